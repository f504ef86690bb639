import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypedDict

import pytest

import vitkit.registry
from vitkit.apps.training.config_listing import format_config
from vitkit.config import cfg_diff, check_config, config_names, load_config, save_config
from vitkit.errors import ConfigError
from vitkit.matchers.base import Matcher
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.model import Model
from vitkit.registry import REGISTRIES, Spec


class Net:
    def __init__(self, depth: int, norm: Literal["bn", "none"] = "bn", frozen_stages: int = 0, out_features=("res5",)):
        pass


class Pooling(TypedDict, total=False):
    kind: Literal["max", "avg"]
    kernel: int | None


class Window:
    def __init__(self, size: tuple[int, int] = (7, 7), drop_path: float | None = None, pooling: Pooling | None = None):
        pass


class Detector(Model):
    def __init__(
        self,
        backbone: Spec,
        neck: Spec | None = None,
        head: Spec = "SmallHead",
        *,
        num_queries: int = 100,
        num_classes: int = 91,
    ):
        pass


class SmallHead:
    def __init__(self, feature_info: Mapping, *, num_classes: int, d_model: int = 256, dropout: float = 0.1, tags=None):
        pass


class Loss(Criterion):
    def __init__(self, weights: dict[str, float], matcher: Spec, no_object_weight: float = 0.1, name: str = "loss"):
        pass


class Match(Matcher):
    def __init__(self, cost_labels: float = 1.0):
        pass


class Transforms(Protocol):
    def __call__(self, image): ...


class Folder(Dataset):
    def __init__(self, images: str, transforms: Sequence[Spec] | Transforms | None = None):
        pass


class Flip:
    def __init__(self, p: float = 0.5):
        pass


class Foreign:
    def __init__(self, transforms: Sequence[dict[str, object]]):
        pass


def adam(model, lr: float, *, lr_multipliers: dict[str, float] | None = None):
    pass


@dataclass(kw_only=True)
class Data:
    root: str = "data"
    train: Spec | None = None
    val: Spec | None = None
    test: Spec | None = None
    images_per_gpu: int = 2


@dataclass(kw_only=True)
class Train:
    epochs: int
    clip_grad_norm: float | None = None
    tags: list[str] = field(default_factory=list)
    hooks: Sequence[Spec] = ()


@pytest.fixture(autouse=True)
def registered(request, monkeypatch):
    """Empty the registries except for this file's classes, for the duration of one test."""
    if "config_name" in request.fixturenames:
        return
    for registry in REGISTRIES.values():
        registry.load_packages()  # otherwise the first look-up would fill the emptied registry
        monkeypatch.setattr(registry, "_constructors", {})
        monkeypatch.setattr(registry, "_variants", {})
    REGISTRIES["backbone"].register(Net)
    REGISTRIES["backbone"].register(Window)
    REGISTRIES["backbone"].register_variants(Net, {"net50": dict(depth=50), "net101": dict(depth=101, norm="none")})
    REGISTRIES["model"].register(Detector)
    REGISTRIES["head"].register(SmallHead)
    REGISTRIES["criterion"].register(Loss)
    REGISTRIES["matcher"].register(Match)
    REGISTRIES["dataset"].register(Folder)
    REGISTRIES["transforms"].register(Flip)
    REGISTRIES["transforms"].register(Foreign)
    REGISTRIES["optimizer"].register(adam, name="Adam")
    REGISTRIES["section"].register(Data, name="data")
    REGISTRIES["section"].register(Train, name="train")


SOURCE = """
def config():
    return dict(
        model=dict(type="Detector", num_queries=5, backbone=dict(type="Net", depth=50, frozen_stages=1)),
        criterion=dict(type="Loss", weights=dict(labels=1.0, l1=5.0), matcher=dict(type="Match")),
        data=dict(train=dict(type="Folder", images="a", transforms=[dict(type="Flip"), "Flip"])),
        optimizer=dict(type="Adam", lr=1e-4),
        train=dict(epochs=3),
    )
"""


@pytest.fixture
def load(tmp_path):
    def load(*overrides, source=SOURCE, name="my_config.py"):
        (tmp_path / name).write_text(source)
        return load_config(tmp_path / name, overrides)

    return load


def error_of(load, *overrides, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **options)
    return str(caught.value)


def test_config_file_becomes_nested_dicts_with_origins(load, tmp_path):
    cfg = load("train.epochs=2")
    assert cfg["model"]["backbone"] == {"type": "Net", "depth": 50, "frozen_stages": 1}
    assert cfg.path == tmp_path / "my_config.py"
    assert cfg.origins["train.epochs"] == "command line"
    assert cfg.origins["model.backbone.depth"] == str(cfg.path)


def test_configs_do_not_share_their_values(load):
    source = (
        "SHARED = dict(type='Net', depth=50)\n"
        "def config():\n    return dict(model=dict(type='Detector', backbone=SHARED))"
    )
    first = load("model.backbone.depth=18", source=source)
    assert first["model"]["backbone"]["depth"] == 18
    assert load(source=source)["model"]["backbone"]["depth"] == 50


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.epochs=2", "train.epochs", 2),
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("optimizer.lr=1", "optimizer.lr", 1),
        ("train.clip_grad_norm=0.1", "train.clip_grad_norm", 0.1),
        ("train.clip_grad_norm=none", "train.clip_grad_norm", None),
        ("criterion.name=2017", "criterion.name", "2017"),
        ("criterion.name=none", "criterion.name", "none"),
        ("criterion.name=a=b", "criterion.name", "a=b"),
        ("model.backbone.norm=none", "model.backbone.norm", "none"),
        ("model.backbone.out_features=[res4,res5]", "model.backbone.out_features", ["res4", "res5"]),
        ("model.backbone.out_features=('res4',)", "model.backbone.out_features", ("res4",)),
        ("train.tags=[]", "train.tags", []),
        ("model.head.tags=[[a,b],[c, none]]", "model.head.tags", [["a", "b"], ["c", None]]),
        ("model.head.tags=[a.png,b c/d]", "model.head.tags", ["a.png", "b c/d"]),
        ("train.tags=[e\u0301]", "train.tags", ["e\u0301"]),
        ("data.train.transforms=[dict(type=Flip,p=1)]", "data.train.transforms", [{"type": "Flip", "p": 1}]),
        ("criterion.weights.l1=2", "criterion.weights.l1", 2),
        ("data.train.transforms.0.p=1", "data.train.transforms.0.p", 1),
        ("data.train.images=../some dir/x", "data.train.images", "../some dir/x"),
    ],
)
def test_override_sets_a_value_of_the_right_type(load, override, key, value):
    node = load(override)
    for part in key.split("."):
        node = node[int(part) if isinstance(node, list) else part]
    assert node == value
    assert type(node) is type(value)


def test_override_of_an_omitted_argument_starts_from_the_constructors_default(load):
    assert load("model.head.dropout=0")["model"]["head"] == {"type": "SmallHead", "dropout": 0}
    assert load("optimizer.lr_multipliers.backbone=0.1")["optimizer"]["lr_multipliers"] == {"backbone": 0.1}
    assert load("train.epochs=1", source="def config():\n    return {}") == {"train": {"epochs": 1}}


def test_override_of_a_spec_by_name_replaces_it_and_later_overrides_extend_it(load):
    assert load("model.backbone=net101")["model"]["backbone"] == "net101"
    cfg = load("model.backbone=net101", "model.backbone.frozen_stages=0")
    assert cfg["model"]["backbone"] == {"type": "net101", "frozen_stages": 0}
    assert cfg.origins["model.backbone.type"] == "command line"
    cfg = load("model.backbone=Window", "model.backbone.size=(8,8)")
    assert cfg["model"]["backbone"] == {"type": "Window", "size": (8, 8)}
    assert load("data.train.transforms.1=Flip", "data.train.transforms.1.p=0.1")["data"]["train"]["transforms"][1] == {
        "type": "Flip",
        "p": 0.1,
    }


def test_keys_of_a_nested_dict_are_checked_like_arguments(load):
    window = "model.backbone=Window"
    cfg = load(window, "model.backbone.pooling.kernel=none", "model.backbone.pooling.kind=avg")
    assert cfg["model"]["backbone"] == {"type": "Window", "pooling": {"kernel": None, "kind": "avg"}}
    for spelling in ("model.backbone.pooling.kernl=3", "model.backbone.pooling=dict(kernl=3)"):
        message = error_of(load, window, spelling)
        assert "model.backbone.pooling.kernl: unknown key 'kernl'. Did you mean 'kernel'" in message
    for spelling in ("model.backbone.pooling.kind=min", "model.backbone.pooling=dict(kind='min')"):
        message = error_of(load, window, spelling)
        assert "model.backbone.pooling.kind: got 'min'" in message and "expected 'max' or 'avg'" in message


def test_a_dict_by_names_takes_further_names(load):
    key = "optimizer.lr_multipliers"
    cfg = load(f"{key}.neck=0.1", f"{key}.head=2")
    assert cfg["optimizer"]["lr_multipliers"] == {"neck": 0.1, "head": 2}
    cfg = load(key + "={'neck': 0.1}", f"{key}.neck=0.2", f"{key}.head=2")
    assert cfg["optimizer"]["lr_multipliers"] == {"neck": 0.2, "head": 2}
    assert f"{key}.head: got 'much'" in error_of(load, f"{key}.neck=0.1", f"{key}.head=much")


def test_override_of_a_spec_may_be_written_as_configs_write_it(load):
    cfg = load("model.backbone=dict(type='Net', depth=101)")
    assert cfg["model"]["backbone"] == {"type": "Net", "depth": 101}
    cfg = load("data.train.transforms=[dict(type='Flip', p=0.25), 'Flip']")
    assert cfg["data"]["train"]["transforms"] == [{"type": "Flip", "p": 0.25}, "Flip"]
    for call in ("dict(**{'type': 'Net'})", "dict([('type', 'Net')])", "open(file='x')"):
        with pytest.raises(ConfigError):  # it is taken for a name
            load(f"model.backbone={call}")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.epochs", ["does not parse", "KEY=VALUE"]),
        ("=3", ["does not parse"]),
        ("train..epochs=3", ["does not parse"]),
        ("train.epoch=3", ["train.epoch:", "Did you mean 'epochs'"]),
        ("trian.epochs=3", ["'trian'", "Did you mean 'train'"]),
        ("model.hed.dropout=0", ["model.hed:", "Did you mean 'head'"]),
        ("model.head.dropuot=0", ["model.head.dropuot", "Did you mean 'dropout'"]),
        ("criterion.weights.l2=1", ["criterion.weights.l2", "'l1'"]),
        ("data.train.transforms.2.p=1", ["data.train.transforms.2", "0, 1"]),
        ("model.num_queries.x=1", ["model.num_queries: is 5"]),
        ("model.neck.channels=1", ["model.neck: not set", "model.neck=NAME"]),
        ("train.epochs=two", ["train.epochs: got 'two'", "expected int"]),
        ("train.epochs=1.5", ["got '1.5'", "expected int"]),
        ("train.epochs=true", ["expected int"]),
        ("train.epochs=none", ["expected int"]),
        ("train.clip_grad_norm=[1]", ["expected float or None"]),
        ("model.backbone.norm=gn", ["got 'gn'", "expected 'bn' or 'none'"]),
        ("model.backbone=net5", ["unknown backbone 'net5'", "Did you mean 'net50'"]),
        ("model.backbone.type=Wndow", ["unknown backbone 'Wndow'", "Did you mean 'Window'"]),
        ("train.tags=[1,2]", ["expected list[str]"]),
        ("train.hooks=Stop", ["train.hooks: got 'Stop'", "expected a list, of which each item is a hook's name or"]),
    ],
)
def test_error_for_a_wrong_override_says_what_is_expected(load, override, parts):
    message = error_of(load, override)
    assert all(part in message for part in parts), message


def test_unannotated_value_keeps_its_type(load):
    assert "expected" in error_of(load, "model.backbone.out_features=5")


def test_changed_type_names_the_arguments_that_no_longer_fit_and_the_remedy(load):
    message = error_of(load, "model.backbone.type=Window")
    assert "Window does not take depth, frozen_stages" in message
    assert "model.backbone=Window" in message
    message = error_of(load, "model.backbone.type=net101")
    assert "net101 has depth=101, but depth=50 would stay, set for the type that it replaces" in message
    assert "instead: model.backbone=net101. To keep them, override them as well: model.backbone.depth=50." in message
    cfg = load("model.backbone.type=net101", "model.backbone.depth=101")
    assert cfg["model"]["backbone"] == {"type": "net101", "depth": 101, "frozen_stages": 1}
    REGISTRIES["backbone"].register_variants(Window, {"pooled": dict(drop_path=0.1, pooling=dict(kernel=3))})
    source = SOURCE.replace('type="Net", depth=50, frozen_stages=1', 'type="Window", drop_path=0.2')
    cfg = load("model.backbone.type=pooled", "model.backbone.pooling.kind=max", source=source)
    kept = {"type": "pooled", "drop_path": 0.2, "pooling": {"kernel": 3, "kind": "max"}}  # a part of a dict was chosen
    assert cfg["model"]["backbone"] == kept


def test_all_issues_are_listed_together(load):
    source = """
def config():
    return dict(
        model=dict(type="Detector", num_querys=5, backbone=dict(type="Net", depth="50")),
        criterion=dict(type="Loss", matcher=dict(type="Macth"), weights=dict(labels="one")),
        data=dict(train=dict(type="Folder", transforms=[dict(type="Flip", p="x"), dict(p=1)]), vall=None),
        optimiser=dict(type="Adam"),
        train=dict(epochs=None),
    )
"""
    message = error_of(load, "train.seeed=1", source=source)
    for part in [
        "10 issues",
        "model.num_querys: Detector has no argument 'num_querys'. Did you mean 'num_queries'",
        "model.backbone.depth: got '50'; expected int",
        "criterion.matcher: unknown matcher 'Macth'. Did you mean 'Match'",
        "criterion.weights: got {'labels': 'one'}; expected dict[str, float]",
        "data.train.transforms.0.p: got 'x'; expected float",
        "data.train.transforms.1: got {'p': 1} without a 'type'",
        "data.vall: Data has no argument 'vall'. Did you mean 'val'",
        "unknown key 'optimiser'. Did you mean 'optimizer'",
        "train.epochs: got None; expected int",
        "train.seeed: unknown key",
    ]:
        assert part in message, (part, message)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (5, "model: got 5; expected a model's name or a dict(type=...)"),
        (dict(type="Detector", backbone=["net50"]), "model.backbone: got ['net50']"),
        (dict(type="Detector", backbone=dict(type="Window", size=[7])), "model.backbone.size: got [7]"),
        (dict(type="Detector", backbone=None), "model.backbone: got None"),
    ],
)
def test_value_of_the_wrong_kind_is_an_error(model, part):
    with pytest.raises(ConfigError) as caught:
        check_config({"model": model})
    assert part in str(caught.value)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_dataset_of_each_split_is_checked(split):
    check_config({"data": {split: dict(type="Folder", images="a", fraction=0.5)}})
    with pytest.raises(ConfigError, match=rf"data\.{split}: unknown dataset 'Foldr'\. Did you mean 'Folder'"):
        check_config({"data": {split: dict(type="Foldr", images="a")}})
    with pytest.raises(ConfigError, match=rf"data\.{split}\.imags: Folder has no argument 'imags'"):
        check_config({"data": {split: dict(type="Folder", imags="a")}})


def test_argument_that_takes_no_names_contains_no_specs():
    foreign = dict(type="Foreign", transforms=[dict(type="OfAnotherLibrary", p=1)])
    check_config({"data": {"train": dict(type="Folder", images="a", transforms=foreign)}})
    with pytest.raises(ConfigError, match="expected Sequence"):
        check_config({"data": {"train": dict(type="Folder", transforms=dict(type="Foreign", transforms=["Flip"]))}})


def test_arguments_supplied_by_the_owner_are_not_missing():
    check_config({"model": dict(type="Detector", backbone="net50", neck=None, head=dict(type="SmallHead"))})


def test_missing_file_names_the_nearest_in_its_folder(load, tmp_path):
    load(name="detr_r50.py")
    with pytest.raises(ConfigError, match=r"no config file .*detr_50.py.*Did you mean 'detr_r50.py'"):
        load_config(tmp_path / "detr_50.py")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("cfg = {}", "has no function config()"),
        ("def config():\n    return [1]", "got list from config()"),
        ("def config():\n    x = 1\n    return x + 'a'", "my_config.py, line 3: TypeError"),
        ("def config(:", "my_config.py, line 1: SyntaxError"),
        ("import no_such_module_at_all", "my_config.py, line 1: ModuleNotFoundError"),
        ("def config():\n    return dict(train=dict(epochs=object))", "train.epochs: got <class 'object'> (type)"),
        ("def config():\n    return {1: 2}", "keys must be strings"),
    ],
)
def test_wrong_file_is_an_error_with_file_and_line(load, source, part):
    assert part in error_of(load, source=source)


def test_user_file_registers_a_backbone(load, tmp_path):
    (tmp_path / "my_backbone.py").write_text(
        "from vitkit.registry import BACKBONES\n"
        "@BACKBONES.register\n"
        "class Mine:\n"
        "    def __init__(self, width: int = 3):\n"
        "        pass\n"
    )
    source = SOURCE.replace("return dict(", "return dict(imports=['my_backbone.py'],")
    cfg = load("model.backbone=Mine", "model.backbone.width=4", source=source)
    assert cfg["imports"] == [str(tmp_path / "my_backbone.py")]
    assert load(source=source)  # once more: the same class is not a conflict

    save_config(cfg, tmp_path / "config.json")
    vitkit.registry.BACKBONES._constructors.pop("Mine")
    assert load_config(tmp_path / "config.json") == cfg


def test_missing_user_file_and_module_are_errors(load):
    source = SOURCE.replace("return dict(", "return dict(imports=['nowhere.py'],")
    assert "imports.0: no file" in error_of(load, source=source)
    source = SOURCE.replace("return dict(", "return dict(imports=['no_such_module_at_all'],")
    assert "imports.0: importing 'no_such_module_at_all' failed" in error_of(load, source=source)


def test_saved_config_loads_equal_with_exact_floats(load, tmp_path):
    cfg = load("optimizer.lr=0.1234567890123456789", "model.backbone=Window", "model.backbone.size=(8,9)")
    save_config(cfg, tmp_path / "config.json")
    again = load_config(tmp_path / "config.json")
    assert again["optimizer"]["lr"] == cfg["optimizer"]["lr"]
    assert again["model"]["backbone"]["size"] == [8, 9]
    assert cfg_diff(cfg, again) == []
    assert json.loads((tmp_path / "config.json").read_text()) == again


def test_damaged_saved_config_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(ConfigError, match="not a saved config"):
        load_config(tmp_path / "config.json")


def test_diff_names_changed_added_and_removed_keys(load):
    changed = load("train.epochs=4", "train.clip_grad_norm=1", "model.backbone=net101")
    assert cfg_diff(load(), changed) == [
        "model.backbone",
        "model.backbone.depth",
        "model.backbone.frozen_stages",
        "model.backbone.type",
        "train.clip_grad_norm",
        "train.epochs",
    ]


def test_listing_shows_every_value_with_its_origin(load, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    load()
    lines = format_config(load_config("my_config.py", ["model.backbone=net101", "train.epochs=2"])).splitlines()
    listing = {tuple(part.strip() for part in line.split("  # ")) for line in lines}
    assert {
        ("model: Detector", "my_config.py"),
        ("num_queries = 5", "my_config.py"),
        ("backbone: net101", "command line"),
        ("depth = 101", "variant net101"),
        ("frozen_stages = 0", "default"),
        ("head: SmallHead", "default"),
        ("dropout = 0.1", "default"),
        ("l1 = 5.0", "my_config.py"),
        ("0: Flip", "my_config.py"),
        ("epochs = 2", "command line"),
        ("tags = []", "default"),
    } <= listing
    assert len({line.index("  # ") for line in lines if "#" in line}) == 1
    assert all("depth" not in line or line.startswith("        depth") for line in lines)


@pytest.mark.parametrize("config_name", config_names())
def test_every_config_in_the_repository_is_valid(config_name):
    cfg = load_config(config_name)
    assert load_config(config_name, ["train.epochs=2"])["train"]["epochs"] == 2
    assert format_config(cfg)


def test_installed_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/detr_r50.py", check=False)["model"]["type"] == "DETR"
    with pytest.raises(ConfigError, match=r"no config file 'configs/detr_r51\.py'"):
        load_config("configs/detr_r51.py")
    with pytest.raises(ConfigError, match=r"nor an installed config of that name. Did you mean 'detr_r50'"):
        load_config("configs/detr_r51")


def test_existing_folders_are_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "runs/a1", "configs/mine"):
        Path(folder).mkdir(parents=True)
    for folder in ("run", "runs/a1/", "."):
        with pytest.raises(ConfigError, match="is a folder; expected a config file. A run's is config.json in its"):
            load_config(folder)
    with pytest.raises(ConfigError, match=r"^no file or folder 'configs/mine/detr'\.$"):
        load_config("configs/mine/detr")
