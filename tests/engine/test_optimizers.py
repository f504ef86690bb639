import copy

import pytest
import torch
from helpers.toy_training import Blocks
from helpers.weights import assert_same_weights
from torch import nn

from vitkit.engine.optimizers import parameter_groups, sgd, takes_model
from vitkit.engine.parallel import load_state, state_of
from vitkit.errors import ConfigError
from vitkit.models.base import DensePredictionModel
from vitkit.registry import OPTIMIZERS, parameters_of


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.head = nn.Linear(2, 2)
        self.head.bias.requires_grad_(False)


def rates(model: nn.Module, **settings) -> dict[str, tuple[float, float]]:
    """Return the learning rate and the weight decay of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, **{"lr": 1.0, "weight_decay": 0.1, **settings})
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def test_every_trainable_parameter_is_in_one_group():
    model = Model()
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1)
    assert sorted(rates(model)) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert sum(len(g["params"]) for g in groups) == 5


def test_backbone_and_named_parts_have_their_own_learning_rates():
    model = Model()
    got = rates(model, lr=1e-3, weight_decay=0.1, backbone_lr=1e-4, lr_multipliers={"head": 2.0})
    assert got["backbone.0.weight"] == pytest.approx((1e-4, 0.1))
    assert got["head.weight"] == pytest.approx((2e-3, 0.1))


def test_norms_and_biases_have_no_weight_decay_only_on_request():
    model = Model()
    assert {d for _, d in rates(model).values()} == {0.1}
    got = rates(model, no_weight_decay=["vectors"])
    assert got["backbone.0.weight"][1] == 0.1
    assert got["backbone.0.bias"][1] == got["backbone.1.weight"][1] == 0.0


def test_names_without_a_match_are_a_warning_with_the_nearest(caplog):
    got = rates(
        Model(),
        lr_multipliers={"hed": 2.0, "head.weight": 3.0},
        no_weight_decay=["bakbone.vectors", "cls_token", "norms"],
    )
    *undecayed, multiplier = caplog.messages
    assert "optimizer.lr_multipliers: no trainable parameter's name contains 'hed', so it has no effect" in multiplier
    assert "Did you mean 'head'" in multiplier
    assert "optimizer.no_weight_decay: no trainable parameter's name contains 'cls_token'" in undecayed[1]
    assert "contains 'bakbone.', so" in undecayed[0] and "Did you mean 'backbone'" in undecayed[0]
    assert len(undecayed) == 2
    # What does match has its effect.
    assert got["head.weight"] == (3.0, 0.1) and got["backbone.1.weight"] == (1.0, 0.0)
    assert got["backbone.0.bias"] == (1.0, 0.1)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizers_are_built_by_name(name):
    optimizer = OPTIMIZERS.build({"type": name, "lr": 0.5}, model=Model())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_every_optimizer_takes_the_options_of_parameter_groups_and_its_own():
    @takes_model
    def rprop(groups, *, lr, step_sizes=(1e-6, 50)):
        return torch.optim.Rprop([{**group, "step_sizes": step_sizes} for group in groups], lr=lr)

    assert set(parameters_of(rprop)) == {*parameters_of(parameter_groups), "step_sizes"}
    groups = rprop(Model(), lr=0.5, backbone_lr=0.1, step_sizes=(1e-3, 1)).param_groups
    assert [(group["lr"], group["step_sizes"]) for group in groups] == [(0.1, (1e-3, 1)), (0.5, (1e-3, 1))]


def test_layer_decay_lowers_the_learning_rate_block_by_block():
    model = Blocks()
    got = rates(model, layer_decay=0.5)
    expected = {
        "backbone.pos_embed": 1 / 8,
        "backbone.stem.weight": 1 / 8,
        "backbone.stage1.0.inner.weight": 1 / 4,
        "backbone.stage1.1.weight": 1 / 4,
        "backbone.stage2.0.inner.bias": 1 / 2,
        "backbone.norm.weight": 1.0,
        "head.inner.weight": 1.0,
    }
    assert {name: got[name][0] for name in expected} == expected
    got = rates(model, layer_decay=0.5, backbone_lr=0.1)
    assert got["backbone.stage2.0.inner.bias"][0] == pytest.approx(0.05)


def test_layer_decay_by_eomts_rule_keeps_the_last_block_and_joins_the_stem_to_the_first():
    model = Blocks()
    expected = {
        "backbone.pos_embed": 1 / 2,
        "backbone.stem.weight": 1 / 2,
        "backbone.stage1.0.inner.weight": 1 / 2,
        "backbone.stage2.0.inner.bias": 1.0,
        "backbone.norm.weight": 1.0,
        "head.inner.weight": 1.0,
    }
    got = rates(model, layer_decay=0.5, layer_decay_rule="eomt")
    assert {name: got[name][0] for name in expected} == expected
    got = rates(model, layer_decay=0.5, full_rate_blocks=1)
    assert got["backbone.stage2.0.inner.bias"][0] == 1.0 and got["backbone.stage1.0.inner.weight"][0] == 1 / 4


def test_layer_decay_needs_blocks_and_a_sensible_factor():
    with pytest.raises(ConfigError, match="layer_decay_rule='vit': expected 'beit' or 'eomt'"):
        rates(Blocks(), layer_decay=0.5, layer_decay_rule="vit")
    with pytest.raises(ConfigError, match="full_rate_blocks=3: expected 0 to 2"):
        rates(Blocks(), layer_decay=0.5, full_rate_blocks=3)
    with pytest.raises(ConfigError, match="layer_decay: the backbone of Model has no blocks"):
        rates(Model(), layer_decay=0.5)
    with pytest.raises(ConfigError, match="layer_decay=1.5: expected"):
        rates(Blocks(), layer_decay=1.5)


def test_named_parameters_have_no_weight_decay(caplog):
    model = Blocks()
    got = rates(model, no_weight_decay=["pos_embed"])
    assert got["backbone.pos_embed"][1] == 0.0 and got["backbone.norm.weight"][1] == 0.1
    assert not caplog.messages


def test_norms_and_embeddings_have_no_weight_decay_by_module_type():
    model = nn.ModuleDict(
        dict(
            convolution=nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)),
            queries=nn.Embedding(3, 4),
            linear=nn.Linear(4, 4),
        )
    )
    model.table = nn.Parameter(torch.zeros(2, 4))
    got = rates(model, no_weight_decay=["norms", "embeddings"])
    without = {name for name, (_, decay) in got.items() if decay == 0}
    assert without == {
        "convolution.1.weight",
        "convolution.1.bias",
        "convolution.2.weight",
        "convolution.2.bias",
        "queries.weight",
    }
    assert got.keys() - without == {
        "convolution.0.weight",
        "convolution.0.bias",
        "linear.weight",
        "linear.bias",
        "table",
    }


def test_nesterov_momentum_takes_a_look_ahead_step():
    def step(nesterov):
        weight = nn.Parameter(torch.tensor([1.0]))
        model = nn.Module()
        model.weight = weight
        optimizer = sgd(model, lr=0.1, weight_decay=0.0, nesterov=nesterov)
        for _ in range(2):
            optimizer.zero_grad()
            (2 * weight).sum().backward()
            optimizer.step()
        return weight.item()

    # Momentum buffers are 2 and 3.8; Nesterov's steps are 2 + 0.9 * 2 and 2 + 0.9 * 3.8.
    assert step(False) == pytest.approx(1 - 0.1 * (2 + 3.8))
    assert step(True) == pytest.approx(1 - 0.1 * (3.8 + 5.42))
    with pytest.raises(ConfigError, match="nesterov: needs momentum"):
        sgd(nn.Linear(1, 1), lr=0.1, momentum=0.0, nesterov=True)


class Detector(nn.Module):
    """The kinds of parameters of a real-time detector: convolutions with norms and affine scalars, biases, queries."""

    def __init__(self):
        super().__init__()

        def part(width: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.Linear(width, width))

        self.backbone = part(4)
        self.backbone.lab_scale = nn.Parameter(torch.ones(1))
        self.neck = nn.Module()
        self.neck.encoder = part(5)
        self.head = nn.Module()
        self.head.decoder = part(6)
        self.head.decoder.norm = nn.LayerNorm(6)
        self.head.queries = nn.Embedding(7, 6)


def test_groups_of_d_fine_are_those_of_its_patterns():
    """Norms everywhere, and biases of encoder and decoder, have no decay; the backbone has a rate of its own."""
    model = Detector()
    got = rates(
        model, lr=2e-4, weight_decay=1e-4, backbone_lr=1e-4, no_weight_decay=["norms", "neck.vectors", "head.vectors"]
    )
    norms = {"backbone.1", "neck.encoder.1", "head.decoder.1", "head.decoder.norm"}
    for name, (lr, decay) in got.items():
        module, _, kind = name.rpartition(".")
        is_free = module in norms or (not name.startswith("backbone.") and kind == "bias")
        assert lr == pytest.approx(1e-4 if name.startswith("backbone.") else 2e-4), name
        assert decay == (0.0 if is_free else 1e-4), name
    assert got["backbone.2.bias"][1] == got["backbone.lab_scale"][1] == got["head.queries.weight"][1] == 1e-4
    # Also all scalars:
    assert rates(model, no_weight_decay=["vectors"])["backbone.lab_scale"][1] == 0.0


def test_groups_of_rf_detr_decay_by_depth_and_part():
    model = Blocks()
    model.head.decoder = nn.Linear(2, 2)
    got = rates(
        model, lr=1e-4, weight_decay=1e-4, backbone_lr=1.5e-4 * 0.7**2, layer_decay=0.8,
        lr_multipliers={"head.decoder.": 0.7}, no_weight_decay=["backbone.vectors", "pos_embed"],
    )  # fmt: skip
    depths = {
        "backbone.pos_embed": 3,
        "backbone.stem": 3,
        "backbone.stage1": 2,
        "backbone.stage2": 1,
        "backbone.norm": 0,
    }
    for name, (lr, decay) in got.items():
        depth = next((value for part, value in depths.items() if name.startswith(part)), None)
        if depth is not None:
            assert lr == pytest.approx(1.5e-4 * 0.8**depth * 0.7**2), name
            assert decay == (0.0 if name.endswith(("bias", "pos_embed")) or "norm" in name else 1e-4), name
        else:
            assert lr == pytest.approx(0.7e-4 if "decoder" in name else 1e-4), name
            assert decay == 1e-4, name


class Hidden(DensePredictionModel):
    """A model with a matrix of each kind."""

    class_head = ("head.class_embed.",)

    def __init__(self):
        nn.Module.__init__(self)
        self.backbone = nn.ModuleDict(dict(conv=nn.Conv2d(3, 4, 1), hidden=nn.Linear(4, 6)))
        self.head = nn.ModuleDict(dict(attention=nn.MultiheadAttention(6, 2), class_embed=nn.Linear(6, 3)))
        self.query_embed, self.table = nn.Embedding(5, 6), nn.Parameter(torch.randn(2, 6))

    def forward(self, x):
        x = self.backbone["hidden"](self.backbone["conv"](x).flatten(2).transpose(1, 2))
        x = x[:, :5] + self.query_embed.weight + self.table.mean(0)
        return self.head["class_embed"](self.head["attention"](x, x, x)[0])


def muon_of(model, **options):
    return OPTIMIZERS.build(dict(type="Muon", lr=0.02, weight_decay=0.1, **options), model=model)


def train(model, optimizer, steps, start=0):
    for k in range(start, start + steps):
        loss = model(torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(k))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    model = Hidden()
    optimizer = muon_of(model, backbone_lr=0.002, no_weight_decay=["vectors"], betas=(0.8, 0.9))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert settings.keys() == dict(model.named_parameters()).keys()
    muon = {name for name, group in settings.items() if "momentum" in group}
    assert muon == {"backbone.hidden.weight", "head.attention.in_proj_weight", "head.attention.out_proj.weight"}
    rates = {name: (group["lr"], group["weight_decay"]) for name, group in settings.items()}
    assert rates["backbone.hidden.weight"] == (0.002, 0.1) and rates["backbone.hidden.bias"] == (0.002, 0.0)
    assert rates["head.attention.out_proj.weight"] == rates["head.class_embed.weight"] == (0.02, 0.1)
    assert settings["table"]["betas"] == (0.8, 0.9)


def test_muon_moves_matrices_orthogonally_at_the_scale_of_adamw():
    torch.manual_seed(0)
    model = Hidden()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    reference = copy.deepcopy(model)
    train(model, muon_of(model), 1)
    train(reference, OPTIMIZERS.build(dict(type="AdamW", lr=0.02, weight_decay=0.1), model=reference), 1)
    after, by_adamw = dict(model.named_parameters()), dict(reference.named_parameters())
    for name in ("table", "backbone.conv.weight", "head.class_embed.weight", "query_embed.weight"):
        assert torch.equal(after[name], by_adamw[name]) and not torch.equal(after[name], before[name])
    name = "backbone.hidden.weight"
    update = after[name] - before[name] * (1 - 0.02 * 0.1)
    singular = torch.linalg.svdvals(update / (0.02 * 0.2 * 6**0.5))
    assert ((singular > 0.6) & (singular < 1.3)).all()  # five steps of the iteration are not exact


def test_a_run_with_muon_is_continued_bit_for_bit():
    torch.manual_seed(0)
    whole = Hidden()
    half = copy.deepcopy(whole)
    optimizer = muon_of(whole)
    train(whole, optimizer, 6)
    first = muon_of(half)
    train(half, first, 3)
    resumed, second = Hidden(), None
    resumed.load_state_dict(half.state_dict())
    second = muon_of(resumed)
    load_state(second, copy.deepcopy(state_of(first, half)), resumed)
    for group in second.param_groups:
        assert group["lr"] == 0.02
    train(resumed, second, 3, start=3)
    assert_same_weights(resumed, whole)
    for group in second.param_groups:  # what a schedule sets counts
        group["lr"] = 0.0
    train(resumed, second, 1)
    assert_same_weights(resumed, whole)


def test_muon_needs_matrices():
    with pytest.raises(ConfigError, match="Muon is for the matrices of hidden layers, and the model trains none"):
        muon_of(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Embedding(3, 4)))


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="PyTorch before 2.9 has no Muon")
def test_muon_is_pytorchs_but_for_its_rounding():
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 9, bias=False))
    theirs = copy.deepcopy(ours)
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    pairs = [(ours, muon_of(ours)), (theirs, reference)]
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in ours.parameters()]
        for model, optimizer in pairs:
            for p, gradient in zip(model.parameters(), gradients):
                p.grad = gradient.clone()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-4)  # PyTorch's iteration has the 8 bits of bfloat16
