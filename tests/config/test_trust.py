"""Saved configs import code only after the user has run or trusted it."""

import importlib
import json
import os
import py_compile
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.processes import run_forked

from vitkit import load_config
from vitkit.apps.inference import load
from vitkit.config import save_config, trust
from vitkit.errors import ConfigError
from vitkit.io.atomic import write_atomically
from vitkit.logging import setup_logging
from vitkit.tools import analyze, browse, doctor, explain, predict
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool


@pytest.fixture(autouse=True)
def nothing_trusted(monkeypatch):
    monkeypatch.setattr(trust, "_trusted_here", set())


@pytest.fixture
def stranger(tmp_path) -> Path:
    """Return a run's folder whose config would write a file if its code ran."""
    run = tmp_path / "stranger"
    run.mkdir()
    (run / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    config = load_config("configs/quickstart/detr.py")
    (run / "config.json").write_text(json.dumps({**config, "imports": ["evil.py"]}))
    for name in ("last.pth", "best.pth"):
        (run / name).write_bytes(b"weights")
    return run


def times_run(run: Path) -> int:
    path = run.parent / "ran"
    return len(path.read_text()) if path.exists() else 0


def test_untrusted_saved_config_names_its_code_and_runs_nothing(stranger):
    with pytest.raises(ConfigError) as caught:
        load_config(stranger / "config.json")
    assert f"imports.0: {stranger / 'evil.py'} (" in str(caught.value) and "--trust" in str(caught.value)
    assert times_run(stranger) == 0


def test_trusted_code_is_remembered_until_it_changes(stranger, monkeypatch):
    load_config(stranger / "config.json", trust=True)
    monkeypatch.setattr(trust, "_trusted_here", set())  # as in a later process
    load_config(stranger / "config.json")
    assert times_run(stranger) == 2
    assert list(json.loads(trust.trust_file().read_text()).values()) == [str(stranger / "evil.py")]
    with (stranger / "evil.py").open("a") as file:
        file.write("1\n")
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(stranger / "config.json")
    assert times_run(stranger) == 2


def test_imports_of_the_users_own_config_are_trusted_in_its_run(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "my_config.py").write_text("def config():\n    return dict(imports=['mine.py', 'colorsys'])\n")
    save_config(load_config(tmp_path / "my_config.py"), tmp_path / "config.json")
    monkeypatch.setattr(trust, "_trusted_here", set())
    assert load_config(tmp_path / "config.json")["imports"] == [str(tmp_path / "mine.py"), "colorsys"]


def test_imports_set_by_overrides_are_trusted(stranger, monkeypatch):
    monkeypatch.chdir(stranger)
    load_config("config.json", ["imports=[evil.py]"])
    assert times_run(stranger) == 1
    (stranger / "worse.py").write_text("")
    (stranger / "config.json").write_text(json.dumps({"imports": ["evil.py", "worse.py"]}))
    with pytest.raises(ConfigError) as caught:
        load_config("config.json", ["imports.0=evil.py"])
    assert "worse.py" in str(caught.value) and "evil.py" not in str(caught.value)


CONFIG = "def config():\n    return dict(imports=['{}'])\n"


@pytest.fixture
def own_run(tmp_path, monkeypatch):
    """Return a function that runs the user's config, which imports a file, and gives the config saved in the run."""
    monkeypatch.chdir(tmp_path)

    def start(plugin: str, run: str) -> Path:
        for path in (Path(plugin), Path(run) / "config.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
        Path(plugin).write_text("import helper\n")
        Path(plugin).with_name("helper.py").write_text("")
        Path("my_config.py").write_text(CONFIG.format(plugin))
        saved = Path(run) / "config.json"
        save_config(load_config("my_config.py"), saved)
        monkeypatch.setattr(trust, "_trusted_here", set())  # as in a later process
        return saved

    return start


@pytest.mark.parametrize("changed", ["my_head.py", "helper.py"])
def test_a_file_that_the_user_named_stays_trusted_when_it_changes(own_run, changed, tmp_path, monkeypatch):
    saved = own_run("my_head.py", "runs/mine")
    Path(changed).write_text("edited = True\n" + Path(changed).read_text())
    load_config(saved)
    # The record was updated: the version is trusted from any folder now, and a version that ran nowhere is not.
    monkeypatch.setattr(trust, "_trusted_here", set())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    load_config(tmp_path / saved)
    (tmp_path / changed).write_text("edited = 2\n" + (tmp_path / changed).read_text())
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(tmp_path / saved)


@pytest.mark.parametrize(
    ("plugin", "run"), [("runs/mine/head.py", "runs/mine"), ("theirs/head.py", "theirs/runs/a"), ("my_head.py", ".")]
)
def test_a_changed_file_that_may_have_come_with_the_run_needs_trust(own_run, plugin, run):
    saved = own_run(plugin, run)
    load_config(saved)
    Path(plugin).write_text("edited = True\n")
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(saved)


def test_a_file_that_was_only_trusted_needs_trust_when_it_changes(stranger, tmp_path, monkeypatch):
    (tmp_path / "shared.py").write_text("")
    (stranger / "config.json").write_text(json.dumps({"imports": ["../shared.py"]}))
    monkeypatch.chdir(tmp_path)
    load_config(stranger / "config.json", trust=True)
    (tmp_path / "shared.py").write_text("edited = True\n")
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(stranger / "config.json")


def test_a_file_beside_a_trusted_one_needs_trust_too(stranger, tmp_path):
    (stranger / "head.py").write_text("import evil\n")
    (stranger / "config.json").write_text(json.dumps({"imports": ["head.py"]}))
    head = str(stranger / "head.py")
    trust.remember([trust.ImportedCode("", head, head, (stranger / "head.py").read_bytes())])
    with pytest.raises(ConfigError, match="imported by .*head.py: .*evil.py") as caught:
        load_config(stranger / "config.json")
    assert "neither run nor trusted" in str(caught.value) and times_run(stranger) == 0
    load_config(stranger / "config.json", trust=True)
    assert times_run(stranger) == 1


def test_installed_modules_need_trust_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"imports": ["antigravity"]}))
    with pytest.raises(ConfigError, match=r"imports\.0: antigravity at .*antigravity\.py \("):
        load_config(tmp_path / "config.json")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "author", ["/home/author/code/evil.py", "C:\\Users\\author\\evil.py", "/root/x/" + "y" * 300 + "/evil.py"]
)
def test_code_that_was_elsewhere_on_its_authors_machine_is_found_beside_the_weights(stranger, author, tmp_path):
    saved = stranger / "config.json"
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "imports": [author]}))
    with pytest.raises(ConfigError, match=r"imports\.0: .*/stranger/evil\.py \("):
        load_config(saved)
    assert times_run(stranger) == 0
    assert load_config(saved, trust=True)["imports"] == [str(stranger / "evil.py")]
    assert times_run(stranger) == 1
    (stranger / "evil.py").unlink()
    photo = tmp_path / "a.png"
    photo.touch()
    with pytest.raises(SystemExit) as caught:
        predict.main([str(stranger), "--input", str(photo)])
    message = str(caught.value.code)
    assert "Ask its author for evil.py" in message and "ONNX file" in message and str(stranger) in message
    assert "\n" not in message


@pytest.fixture
def on_the_path(tmp_path, monkeypatch):
    """Return a function that writes files into a folder, which is then the only one of a test on Python's path, and a
    saved config that imports a module; with a function that forgets what was imported, as in a later process."""
    before = set(sys.modules), list(sys.meta_path)

    def forget():
        monkeypatch.setattr(trust, "_trusted_here", set())
        for name in set(sys.modules) - before[0]:
            if name.partition(".")[0] in ("plain", "helper", "package", "space"):
                del sys.modules[name]
        sys.meta_path[:] = before[1]
        importlib.invalidate_caches()

    def write(folder: str, module: str, files: Mapping[str, str]) -> Path:
        forget()
        for name, text in files.items():
            path = tmp_path / folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *[p for p in sys.path if str(tmp_path) not in p]])
        (tmp_path / "saved.json").write_text(json.dumps({"imports": [module]}))
        return tmp_path / "saved.json"

    yield write
    forget()


@pytest.mark.parametrize(
    ("module", "changed"),
    [
        ("plain", "plain"),
        ("plain", "helper"),
        ("package", "package/__init__"),
        ("package.part", "package/__init__"),
        ("package.part", "package/part"),
        ("package.part", "package/below"),
        ("space.part", "space/part"),
    ],
)
def test_a_module_is_trusted_by_its_source_and_not_by_its_name(on_the_path, tmp_path, module, changed):
    ran = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n"
    files = {
        "plain": "import helper\n",
        "helper": "",
        "package/__init__": "",
        "package/part": "from package import below\n",
        "package/below": "",
        "space/part": "",
    }
    saved = on_the_path("first", module, files)
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(saved)
    load_config(saved, trust=True)
    assert not [name for name in sys.modules if name in files and name not in (module, "helper")]
    on_the_path("second", module, files)  # the same code in another folder
    load_config(saved)
    on_the_path("second", module, {**files, changed: ran + files[changed]})
    with pytest.raises(ConfigError, match="neither run nor trusted before") as caught:
        load_config(saved)
    assert str(tmp_path / "second") in str(caught.value) and not (tmp_path / "ran").exists()
    load_config(saved, trust=True)
    assert (tmp_path / "ran").exists()


def test_a_cached_compilation_beside_a_trusted_module_does_not_run(on_the_path, tmp_path):
    harmless = "x = 1" + " " * 200 + "\n"
    saved = on_the_path("folder", "plain", {"plain": harmless})
    load_config(saved, trust=True)
    source = tmp_path / "folder" / "plain.py"
    status = source.stat()
    source.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')".ljust(len(harmless) - 1) + "\n")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    py_compile.compile(str(source))
    source.write_text(harmless)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    on_the_path("folder", "plain", {})
    load_config(saved)
    assert sys.modules["plain"].x == 1 and not (tmp_path / "ran").exists()


def test_a_module_stays_imported_and_later_imports_of_its_package_are_trusted_likewise(on_the_path, tmp_path):
    part = "def late():\n    from package import below\n    return below.x\n"
    files = {"package/__init__": "", "package/part": part, "package/below": "x = 1\n"}
    saved = on_the_path("folder", "package.part", files)
    load_config(saved, trust=True)
    part = sys.modules["package.part"]
    assert part.late() == 1 and list(sys.modules["package"].__path__) == [str(tmp_path / "folder" / "package")]
    load_config(saved)
    assert sys.modules["package.part"] is part
    on_the_path("folder", "package.part", {"package/below": "x = 2\n"})
    load_config(saved)
    with pytest.raises(ConfigError, match="below.py"):
        sys.modules["package.part"].late()


def test_commands_that_remember_code_at_the_same_time_do_not_forget_each_others(monkeypatch):
    first, second = (trust.ImportedCode("imports.0", "a.py", "a.py", source) for source in (b"first", b"second"))
    other = threading.Thread(target=trust.remember, args=([second],))

    def write_beside_another(*args, **options):
        if other.ident is None:
            other.start()
            other.join(timeout=0.2)  # it would be done, if it did not wait
        write_atomically(*args, **options)

    monkeypatch.setattr(trust, "write_atomically", write_beside_another)
    trust.remember([first])
    other.join()
    assert json.loads(trust.trust_file().read_text()).keys() == {first.checksum, second.checksum}


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("home", ["/dev/null", None], ids=["not writable", "none"])
def test_without_a_home_trust_lasts_for_one_process_and_a_line_says_so(stranger, monkeypatch, home, capsys):
    if home is None:
        monkeypatch.delenv("XDG_CONFIG_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    else:
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
    setup_logging()
    load_config(stranger / "config.json", trust=True)
    load_config(stranger / "config.json")
    assert times_run(stranger) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert "cannot be remembered as trusted" in line and "Set XDG_CONFIG_HOME to a folder" in line


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"a": ', b"[" * 200_000])
def test_damaged_trust_list_trusts_nothing(stranger, content):
    trust.trust_file().parent.mkdir(parents=True)
    trust.trust_file().write_bytes(content)
    with pytest.raises(ConfigError, match="neither run nor trusted"):
        load_config(stranger / "config.json")
    load_config(stranger / "config.json", trust=True)
    assert len(json.loads(trust.trust_file().read_text())) == 1


def test_every_tool_and_the_loader_require_trust(stranger, capsys):
    config, weights = str(stranger / "config.json"), str(stranger / "last.pth")
    image = str(stranger / "a.png")
    Path(image).write_bytes(b"image")
    commands = [
        (predict.main, [str(stranger), "--input", image]),
        (test_tool.main, [config, weights]),
        (explain.main, [config, weights, "--image", image]),
        (analyze.main, [config]),
        (browse.main, [config]),
        (doctor.main, [config]),
        (train_tool.main, ["--resume", str(stranger)]),
    ]
    for main, arguments in commands:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert "neither run nor trusted" in str(caught.value)
    for source in (stranger, config):
        with pytest.raises(ConfigError, match="neither run nor trusted"):
            load(source, weights)
    assert times_run(stranger) == 0
    assert analyze.main([config, "--trust", "--size", "64x64"]) is None
    assert times_run(stranger) == 1
    capsys.readouterr()


def run_command() -> None:
    predict.main()


def test_untrusted_code_cannot_be_run_from_the_command_line(stranger, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vitkit predict", str(stranger), "--input", str(stranger / "config.json")])
    monkeypatch.setenv("HOME", str(tmp_path))
    status, printed = run_forked(run_command)
    assert status == 1 and "evil.py" in printed and "Traceback" not in printed
    assert times_run(stranger) == 0
