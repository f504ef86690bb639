"""A ResNet-50 for transfer to small datasets."""


def resnet50_for_transfer(norm="bn", **changes):
    """ResNet-50 from torchvision's ImageNet weights, whose batch norms are trained further unless norm="frozen_bn".

    Keras's weights (https://keras.io/api/applications/resnet/), under torchvision's names, need
    `model.backbone.stride_in_1x1=true model.backbone.pixel_mean=[0.48502,0.45796,0.40760]` in addition to
    `model.backbone.pretrained=FILE`; random ones need `model.backbone.pretrained=false`.
    """
    return dict(type="ResNet", depth=50, norm=norm, pretrained=True, **changes)
