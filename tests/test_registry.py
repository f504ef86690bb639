import pytest
from helpers.processes import run_anew

import vitkit
from vitkit.errors import ConfigError
from vitkit.registry import REGISTRIES, Registry, check_names, nearest


@pytest.fixture
def registry():
    return Registry("engine")


def make_class(name="Rotary", module=__name__):
    class Made:
        def __init__(self, speed: int, *, fuel: str = "diesel", load: float = 0.0):
            self.arguments = (speed, fuel, load)

    Made.__name__ = Made.__qualname__ = name
    Made.__module__ = module
    return Made


def error_of(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_class_registers_under_its_name_and_stays_usable(registry):
    Rotary = make_class()
    assert registry.register(Rotary) is Rotary
    assert registry.names() == ["Rotary"]
    assert "Rotary" in registry


def test_function_registers_under_a_chosen_name(registry):
    @registry.register(name="Twice")
    def twice(x: int) -> int:
        return 2 * x

    assert twice(1) == 2
    assert registry.build("Twice", x=3) == 6


def test_variants_are_names_for_a_class_with_arguments(registry):
    Rotary = registry.register(make_class())
    registry.register_variants(Rotary, {"rotary_fast": {"speed": 9, "load": 0.5}, "rotary_slow": {"speed": 1}})
    assert registry.names() == ["Rotary", "rotary_fast", "rotary_slow"]
    assert registry.build("rotary_fast").arguments == (9, "diesel", 0.5)
    assert registry.build({"type": "rotary_fast", "load": 0.1}).arguments == (9, "diesel", 0.1)


def test_build_combines_the_arguments_of_spec_and_owner(registry):
    registry.register(make_class())
    spec = {"type": "Rotary", "speed": 2}
    assert registry.build(spec, fuel="gas").arguments == (2, "gas", 0.0)
    assert spec == {"type": "Rotary", "speed": 2}


def test_built_object_is_returned_unchanged(registry):
    built = object()
    assert registry.build(built) is built


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("Rotari", ["unknown engine 'Rotari'", "Did you mean 'Rotary'?", "Known: Rotary, rotary_slow."]),
        ("ROTARY", ["unknown engine 'ROTARY'", "Did you mean 'Rotary'?"]),
        ({"type": "rotary_slw"}, ["unknown engine 'rotary_slw'", "'rotary_slow'"]),
        ({"speed": 3}, ["without a 'type'", "Known: Rotary"]),
        ({"type": None}, ["without a 'type'"]),
        ({"type": "Rotary", "speed": 1, "fule": "gas"}, ["unknown argument 'fule'", "Did you mean 'fuel'?"]),
        ({"type": "Rotary"}, ["engine Rotary: missing argument speed"]),
        ({"type": "Rotary", "speed": 1, "load": 2.0}, ["load is set by its owner"]),
    ],
)
def test_error_for_a_wrong_spec_says_what_is_expected(registry, spec, parts):
    Rotary = registry.register(make_class())
    registry.register_variants(Rotary, {"rotary_slow": {"speed": 1}})
    message = error_of(registry.build, spec, load=1.0)
    assert all(part in message for part in parts), message


def test_missing_argument_is_named_also_if_a_class_passes_others_to_its_base(registry):
    class Geared(make_class()):
        def __init__(self, gear, **options):
            super().__init__(speed=gear, **options)

    registry.register(Geared)
    assert registry.build("Geared", gear=3).arguments[0] == 3  # its base's `speed` is not missing
    assert error_of(registry.build, "Geared") == "engine Geared: missing argument gear."


def test_resolve_names_the_config_key_in_errors(registry):
    assert error_of(registry.resolve, "Rotary", "model.engine").startswith("model.engine: unknown engine 'Rotary'")


def test_taken_name_is_an_error_that_names_the_other_module(registry):
    registry.register(make_class(module="first"))
    message = error_of(registry.register, make_class(module="second"))
    assert "'Rotary' is already registered by first" in message
    assert "already registered" in error_of(
        registry.register_variants, make_class("Other", "second"), {"Rotary": {"speed": 1}}
    )


def test_same_class_may_register_again(registry):
    registry.register(make_class())
    again = registry.register(make_class())
    assert isinstance(registry.build("Rotary", speed=1), again)


def test_check_names_accepts_what_the_constructor_takes():
    check_names(make_class(), ["speed", "load"], "here")
    assert error_of(check_names, make_class(), ["sped"], "here").startswith("here: unknown argument 'sped'")


def test_nearest_lists_all_names_when_none_is_near():
    assert nearest("zzz", ["b", "a"]) == "Known: a, b."
    assert nearest("x", []) == "Known: (none)."
    assert nearest("name_7", [f"name_{k}" for k in range(50)] + ["other"]).endswith("'? There are 51 names.")
    assert nearest("zzz", [f"name_{k}" for k in range(50)]).endswith(", and 10 more.")


def test_registries_are_found_by_kind():
    assert all(registry.kind == kind for kind, registry in REGISTRIES.items())
    assert {"backbone", "neck", "head", "model", "matcher", "criterion", "dataset", "transforms"} <= REGISTRIES.keys()


def test_names_are_registered_whichever_module_is_imported_first():
    script = "from vitkit.registry import BACKBONES; assert 'swin_tiny' in BACKBONES and len(BACKBONES.names()) > 20"
    status, printed = run_anew(script)
    assert status == 0, printed


def test_every_public_name_can_be_imported():
    assert all(getattr(vitkit, name) is not None for name in vitkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Backbones'"):
        vitkit.Backbones  # noqa: B018


def test_an_error_of_a_constructor_names_the_config_path_of_every_build_around_it():
    outer, inner = Registry("outer", in_errors=True), Registry("inner", in_errors=True)

    @inner.register
    class Layer:
        def __init__(self, width: int):
            if width < 1:
                raise ConfigError(f"width={width}: expected at least 1.")

    @outer.register
    class Stack:
        def __init__(self, inner_spec: dict):
            inner.build(inner_spec)

    with pytest.raises(ConfigError, match=r"^width=0: expected at least 1\.$"):
        Layer(0)
    with pytest.raises(ConfigError, match=r"^outer\.inner: width=0: expected at least 1\.$"):
        outer.build({"type": "Stack", "inner_spec": {"type": "Layer", "width": 0}})


def test_a_failure_in_the_constructor_of_an_own_class_names_the_class_its_key_and_the_line():
    evaluators = Registry("evaluator")

    @evaluators.register
    class Mine:
        def __init__(self, dataset: list, *, key: str = "a"):
            self.names = dataset.classses if key == "a" else {}[key]

    place = r"\(test_registry\.py, line \d+\)\.$"
    failed = "^evaluator Mine: its constructor failed: "
    with pytest.raises(ConfigError, match=rf"{failed}AttributeError: .*'classses' {place}"):
        evaluators.build("Mine", dataset=[])
    with pytest.raises(ConfigError, match=rf"{failed}KeyError: 'b' {place}"):
        evaluators.build(dict(type="Mine", key="b"), dataset=[])
    Mine.__module__ = "vitkit.evaluation.mine"  # a fault of the library keeps its traceback
    with pytest.raises(AttributeError):
        evaluators.build("Mine", dataset=[])
