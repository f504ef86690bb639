"""A Transformer captioner on COCO: ResNet-101, three encoder and three decoder layers of 512 channels.

The sizes are those of the captioning Transformers of Cornia et al. 2020 (https://arxiv.org/abs/1912.08226), with the
plain layers of Vaswani et al. 2017 on the feature map of a backbone, which is trained as well, at a tenth of the
learning rate.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/caption_transformer_coco.py
Reference: none published for exactly this model. Here: not yet run on COCO.
"""

from vitkit.configs.parts.coco_captions import coco_captions


def config():
    return dict(
        model=dict(
            type="TransformerCaptioner", num_encoder_layers=3, num_decoder_layers=3, d_model=512, d_ffn=2048,
            backbone=dict(type="resnet101", pretrained=True, frozen_stages=1),
            decoding=dict(method="beam", beams=5, length_penalty=0.6, max_length=40),
        ),
        criterion=dict(type="SequenceLoss", label_smoothing=0.1),
        data=coco_captions(images_per_gpu=32),
        optimizer=dict(
            type="AdamW", lr=2e-4, backbone_lr=2e-5, weight_decay=0.01, no_weight_decay=["vectors"],
        ),
        schedule=dict(type="CosineLR", warmup_epochs=1),
        evaluator=dict(type="CaptionEvaluator"),
        train=dict(
            # An epoch shows one of five captions of each image.
            epochs=50, clip_grad_norm=1.0, precision="auto", reference_batch_size=256, best_metric="CIDEr-D",
            eval_every=2,
        ),
    )  # fmt: skip
