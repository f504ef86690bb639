"""Repositories of the hub, from a local server that responds as the hub does."""

import hashlib
import http.server
import json
import re
import socket
import threading
import time
from urllib.parse import unquote

import huggingface_hub
import numpy as np
import pytest
import torch
from helpers.grounding_models import bert_vocabulary, grounding_config
from safetensors.torch import load_file, save

import vitkit
from vitkit import CheckpointError, ConfigError, load_weights
from vitkit.apps.conversion.transformers_writing import write_folder
from vitkit.apps.inference import Predictor, find_model
from vitkit.apps.training.api import find_start
from vitkit.engine.build import build_model
from vitkit.weights import download, hub, tokenizer_files, transformers_folder

COMMIT = "a" * 40
SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32)
VIT = SMALL | dict(
    model_type="vit", architectures=["ViTForImageClassification"], patch_size=16, id2label={"0": "cat", "1": "dog"}
)


def weights():
    """A small ViT under the names of the transformers library."""
    from vitkit.model_zoo.converters import write_names

    torch.manual_seed(0)
    backbone = dict(type="ViT", patch_size=16, d_model=16, depth=1, num_heads=2, mlp_ratio=2.0, image_size=32)
    model = build_model(dict(type="Classifier", num_classes=2, backbone=backbone))
    return write_names(model, "transformers").state


def sharded(state):
    files = {f"model-{i}.safetensors": dict(list(state.items())[i::2]) for i in range(2)}
    index = {"weight_map": {key: name for name, part in files.items() for key in part}}
    return {name: save(part) for name, part in files.items()} | {
        "model.safetensors.index.json": json.dumps(index).encode()
    }


@pytest.fixture
def repositories(monkeypatch, tmp_path):
    """The server's files: repository -> file -> content.

    "asked" lists the files that were fetched, "lies" has what the server answers in place of the truth: headers, the
    description of a repository, or the seconds between two bytes of a file.
    """
    content = {"lies": {}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            if self.path.startswith("/api/models/"):
                self.list_files()
            else:
                content["asked"].append(self.path.rsplit("/", 1)[-1])
                self.answer(body=True)

        def list_files(self):
            """Answer with the repository's commit and files, or with the list of one folder of it."""
            path, _, _ = unquote(self.path).removeprefix("/api/models/").partition("?")
            repository, kind, revision = re.fullmatch(r"([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path).groups()
            files = content.get(repository)
            missing = None
            if files is None:
                missing = "RepoNotFound"
            elif revision not in (None, "main", COMMIT):
                missing = "RevisionNotFound"
            if kind == "tree":
                found = [dict(type="file", path=name, size=len(data), oid=COMMIT) for name, data in files.items()]
            else:
                found = dict(id=repository, sha=COMMIT, siblings=[dict(rfilename=name) for name in files or ()])
            data = content["lies"].get("description", json.dumps(found).encode())
            self.send_response(404 if missing else 200)
            if missing:
                self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, *, body):
            repository, _, rest = unquote(self.path).lstrip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            files = content.get(repository)
            missing = None
            if files is None:
                missing = "RepoNotFound"
            elif revision not in ("main", COMMIT):
                missing = "RevisionNotFound"
            elif name not in files:
                missing = "EntryNotFound"
            data = b"" if missing else files[name]
            self.send_response(404 if missing else 200)
            if missing:
                self.send_header("X-Error-Code", missing)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'} | content["lies"]
            headers |= headers.pop(name, {})
            for header in headers.keys() - {"description", "seconds"}:
                self.send_header(header, headers[header])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and "seconds" in content["lies"]:
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(content["lies"]["seconds"])
            elif body:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    content["asked"] = []
    monkeypatch.setattr(hub, "_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    yield content
    server.shutdown()
    server.server_close()


def test_repository_is_loaded_as_a_model_and_downloaded_once(repositories):
    state = weights()
    processor = json.dumps(dict(size=dict(height=32, width=32), image_mean=[0.5] * 3, image_std=[0.5] * 3))
    repositories["cats/vit"] = {
        "config.json": json.dumps(VIT).encode(),
        "model.safetensors": save(state),
        "preprocessor_config.json": processor.encode(),
        "pytorch_model.bin": b"never asked for",
    }
    model = vitkit.load("hf:cats/vit")
    assert model.classes == ["cat", "dog"] and model.transforms is not None
    assert torch.equal(model.model.backbone.head.weight, state["classifier.weight"])
    assert sorted(repositories["asked"]) == ["config.json", "model.safetensors", "preprocessor_config.json"]
    other = vitkit.load("hf:cats/vit").model
    load_weights(other, "hf:cats/vit")
    assert len(repositories["asked"]) == 3
    with pytest.raises(CheckpointError, match="hf:cats/vit@v2: the repository has no revision 'v2'"):
        vitkit.load("hf:cats/vit@v2")


def test_each_file_of_weights_is_read_once(repositories, monkeypatch):
    read = []
    monkeypatch.setattr(transformers_folder, "load_file", lambda path: (read.append(path.name), load_file(path))[1])
    repositories["cats/large"] = {"config.json": json.dumps(VIT).encode(), **sharded(weights())}
    assert vitkit.load("hf:cats/large").classes == ["cat", "dog"]
    assert sorted(read) == ["model-0.safetensors", "model-1.safetensors"]


def test_all_files_of_sharded_weights_are_downloaded(repositories, monkeypatch):
    state = weights()
    repositories["cats/large"] = {"config.json": json.dumps(VIT).encode(), **sharded(state)}
    model = vitkit.load("hf:cats/large").model
    assert torch.equal(model.backbone.pos_embed, state["vit.embeddings.position_embeddings"])
    # Without the network, the cache is enough.
    monkeypatch.setattr(hub, "_ENDPOINT", "http://127.0.0.1:9")
    again = vitkit.load("hf:cats/large").model
    assert torch.equal(again.backbone.pos_embed, model.backbone.pos_embed)


@pytest.mark.parametrize("find", [vitkit.load, find_start], ids=["load", "start of a run"])
def test_an_architecture_that_vitkit_lacks_is_refused_before_its_weights_are_fetched(repositories, find):
    config = dict(model_type="yolos", architectures=["YolosForObjectDetection"])
    repositories["others/yolos"] = {"config.json": json.dumps(config).encode(), "model.safetensors": b"large"}
    with pytest.raises(
        ConfigError, match="'yolos' .architectures: YolosForObjectDetection.* Known: bert, d_fine, deformable_detr"
    ):
        find("hf:others/yolos")
    assert repositories["asked"] == ["config.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:nobody/nothing", "hf:nobody/nothing: there is no such repository, or it is private"),
        ("hf:a/b/c", "hf:a/b/c: not the name of a repository; expected hf:OWNER/NAME"),
        ("hf:cats/text", "hf:cats/text: has no config.json"),
        ("hf:cats/empty", "hf:cats/empty: has no weights: expected model.safetensors"),
    ],
)
def test_names_that_are_not_models_are_a_one_line_error(repositories, name, message):
    repositories["cats/text"] = {"README.md": b"x"}
    repositories["cats/empty"] = {"config.json": json.dumps(VIT).encode()}
    with pytest.raises(CheckpointError, match=message) as error:
        vitkit.load(name)
    assert "\n" not in str(error.value)


def test_error_for_an_unreachable_hub_names_a_remedy(repositories, monkeypatch):
    monkeypatch.setattr(hub, "_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match="hf:cats/vit: cannot be reached, and config.json is not in the cache"
    ) as error:
        vitkit.load("hf:cats/vit")
    assert "HF_HUB_OFFLINE" in str(error.value) and "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_is_an_error_in_seconds_and_the_cache_is_used(repositories, monkeypatch):
    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode(), "model.safetensors": save(weights())}
    vitkit.load("hf:cats/vit")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and sends nothing
        monkeypatch.setattr(hub, "_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(CheckpointError, match="hf:cats/new: cannot be reached, and config.json is not in") as error:
            vitkit.load("hf:cats/new")
        assert "HF_HUB_ETAG_TIMEOUT" in str(error.value) and "\n" not in str(error.value)
        assert vitkit.load("hf:cats/vit").classes == ["cat", "dog"]
        # The client's own retries take over half a minute, even if each request ends at once.
        assert time.monotonic() - start < 20


def describe(**changes):
    siblings = [dict(rfilename="config.json"), dict(rfilename="model.safetensors")]
    return dict(description=json.dumps(dict(id="cats/vit", sha=COMMIT, siblings=siblings) | changes).encode())


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"ETag": '"../../../../outside"'}, "answers with '../../../../outside' for the version of config.json"),
        ({"ETag": '".."'}, "answers with '..' for the version of config.json"),
        ({"X-Linked-Etag": '"a/b"'}, "answers with 'a/b' for the version of config.json"),
        ({"Location": "file:///etc/passwd"}, "answers with 'file:///etc/passwd' for the address of config.json"),
        (describe(sha="../../outside"), "answers with '../../outside' for a commit"),
        (describe(sha=None), "answers with 'None' for a commit"),
        (describe(siblings=[1]), "answers with .TypeError: .* for the repository's files"),
        (describe(siblings=[{}]), "answers with .KeyError: .* for the repository's files"),
        (describe(siblings={"a": 1}), "answers with .TypeError: .* for the repository's files"),
        (dict(description=b"[]"), "answers with .*Error: .* for the repository's files"),
        (dict(description=b'"text"'), "answers with .*Error: .* for the repository's files"),
        (dict(description=b"<html>"), "cannot be reached, and config.json is not in the cache"),
        ({"X-Linked-Etag": f'"{"0" * 64}"'}, "config.json: .*sha256 begins [0-9a-f]{64}, expected 0{64}"),
    ],
)
def test_what_a_server_names_leaves_no_trace_outside_the_cache(repositories, tmp_path, lies, message):
    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode(), "model.safetensors": save(weights())}
    repositories["lies"] = lies
    with pytest.raises(CheckpointError, match=message) as error:
        vitkit.load("hf:cats/vit")
    assert "\n" not in str(error.value) and str(error.value).startswith("hf:cats/vit: ")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "blobs" not in path.parts]
    assert not [*tmp_path.rglob("blobs/*")]


def test_the_checksum_that_a_version_states_is_compared(repositories, tmp_path):
    config = json.dumps(VIT).encode()
    repositories["cats/vit"] = {"config.json": config, "model.safetensors": b"other bytes"}
    stated = [hashlib.sha256(content).hexdigest() for content in (config, b"bytes")]
    repositories["lies"] = {
        name: {"X-Linked-Etag": f'"{digest}"'} for name, digest in zip(repositories["cats/vit"], stated, strict=True)
    }
    with pytest.raises(CheckpointError, match="hf:cats/vit@main: model.safetensors: .*sha256 begins") as error:
        vitkit.load("hf:cats/vit@main")
    assert all(digest in str(error.value) for digest in (stated[1], hashlib.sha256(b"other bytes").hexdigest()))
    assert [path.read_bytes() for path in tmp_path.rglob("blobs/*")] == [config]


def test_a_server_that_drips_is_given_up(repositories, monkeypatch):
    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode(), "model.safetensors": save(weights())}
    repositories["lies"] = dict(seconds=0.05)
    monkeypatch.setattr(download, "_GRACE", 0.5)
    with pytest.raises(CheckpointError, match=r"hf:cats/vit: config.json cannot be .* bytes arrived in 1 s"):
        vitkit.load("hf:cats/vit")
    monkeypatch.setattr(hub, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: time.sleep(1))
    with pytest.raises(CheckpointError, match="hf:cats/vit: cannot be reached"):
        vitkit.load("hf:cats/vit")


@pytest.mark.parametrize("revision", ["../../x", "a//b", "a b", "."])
def test_a_revision_that_is_no_name_of_a_file_is_refused(revision):
    with pytest.raises(CheckpointError, match="is not a revision; expected a branch, a tag or a commit"):
        vitkit.load(f"hf:cats/vit@{revision}")


def fail_at(monkeypatch, lost, error):
    def ask_or_fail(url, **options):
        if url.endswith(f"/{lost}"):
            raise error
        return huggingface_hub.get_hf_file_metadata(url, **options)

    monkeypatch.setattr(hub, "get_hf_file_metadata", ask_or_fail)


@pytest.mark.parametrize("lost", ["preprocessor_config.json", "model-0.safetensors", "model.safetensors.index.json"])
def test_lost_connection_is_not_taken_for_a_missing_file(repositories, monkeypatch, lost):
    files = {"config.json": json.dumps(VIT).encode(), "preprocessor_config.json": b"{}"}
    repositories["cats/large"] = files | sharded(weights())
    fail_at(monkeypatch, lost, ConnectionError("connection lost"))
    with pytest.raises(CheckpointError, match=f"hf:cats/large: {lost} cannot be downloaded .*connection lost"):
        vitkit.load("hf:cats/large")


def test_offline_without_the_preprocessing_file_is_a_warning(repositories, monkeypatch, caplog):
    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode(), "model.safetensors": save(weights())}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot be reached, and config.json is not in the cache"):
        vitkit.load("hf:cats/vit")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.snapshot_download(
        "cats/vit",
        allow_patterns=["config.json", "model.safetensors"],
        cache_dir=huggingface_hub.constants.HF_HUB_CACHE,
        endpoint=hub._ENDPOINT,
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    vitkit.load("hf:cats/vit")
    assert "hf:cats/vit: offline, and preprocessor_config.json is not in the cache" in caplog.text


def test_http_library_errors_become_one_line(repositories, monkeypatch):
    class Broken(huggingface_hub.errors.HfHubHTTPError.__bases__[0]):
        def __init__(self):
            Exception.__init__(self, "peer closed connection\nwithout a word")

    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode()}
    fail_at(monkeypatch, "config.json", Broken())
    with pytest.raises(CheckpointError, match="cannot be downloaded or stored .peer closed connection.") as e:
        vitkit.load("hf:cats/vit")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("index", [b'{"weight_map": ["a"]}', b"{}", b'{"weight_map": {"a": "../b.safetensors"}}'])
def test_damaged_repository_index_is_a_one_line_error(repositories, index):
    repositories["cats/bad"] = {"config.json": json.dumps(VIT).encode(), "model.safetensors.index.json": index}
    with pytest.raises(CheckpointError, match="index.json: .*weight_map|expected files beside it") as error:
        vitkit.load("hf:cats/bad")
    assert "\n" not in str(error.value)


def test_error_for_a_full_cache_names_its_folder(repositories, monkeypatch):
    repositories["cats/vit"] = {"config.json": json.dumps(VIT).encode()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_receive", full)
    with pytest.raises(CheckpointError, match="cannot be downloaded or stored .No space left.* set HF_HOME"):
        vitkit.load("hf:cats/vit")


@pytest.mark.parametrize(
    ("name", "mm"),
    [
        ("IDEA-Research/grounding-dino-tiny", False),
        ("openmmlab-community/mm_grounding_dino_tiny_o365v1_goldg_v3det", True),
        ("iSEE-Laboratory/llmdet_tiny", True),
    ],
)
def test_text_prompted_detectors_come_with_their_tokens(repositories, tmp_path, monkeypatch, name, mm):
    pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    spec = grounding_config(mm=mm, shared=not mm)
    torch.manual_seed(0)
    model = build_model(spec, vocabularies={"target": bert_vocabulary()})
    original = Predictor(model, (), transforms=dict(type="EvalResize", short_side=96, max_size=160))
    write_folder(tmp_path / "folder", original, spec)
    repositories[name] = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    predictor = vitkit.load(f"hf:{name}")
    asked = ["config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"]
    assert sorted(repositories["asked"]) == asked
    image = np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8)
    ours, theirs = (p(image, text="a cat . red hotdogs .", threshold=0.0) for p in (predictor, original))
    assert ours.names == theirs.names and set(ours.names) == {"a cat", "red hotdogs"}
    torch.testing.assert_close(ours.scores, theirs.scores)

    def unreachable(url, **options):
        raise CheckpointError(f"cannot download {url}.")

    monkeypatch.setattr(tokenizer_files, "fetch_file", unreachable)
    del repositories[name]["tokenizer.json"]
    repositories["other/copy"] = repositories[name]
    with pytest.raises(
        CheckpointError, match=r"bert-base-uncased/resolve/main/vocab\.txt\. This is the tokenizer's file: without"
    ):
        vitkit.load("hf:other/copy")


def swin(side, window, dim, depths, heads, stages):
    config = dict(image_size=side, window_size=window, embed_dim=dim, depths=depths, num_heads=heads)
    return dict(model_type="swin", out_features=[f"stage{stage}" for stage in stages], **config)


# As in the repositories' files, without what they state of losses.
SHARED = dict(
    activation_function="relu", d_model=256, decoder_attention_heads=8, decoder_ffn_dim=2048, decoder_layers=6,
    decoder_n_points=4, dropout=0.1, embedding_init_target=True, encoder_attention_heads=8, encoder_ffn_dim=2048,
    encoder_layers=6, encoder_n_points=4, fusion_dropout=0.0, fusion_droppath=0.1, layer_norm_eps=1e-05,
    max_text_len=256, num_queries=900, position_embedding_type="sine", positional_embedding_temperature=20, query_dim=4,
    text_config=dict(model_type="bert"), text_enhancer_dropout=0.0, two_stage=True, backbone=None, backbone_kwargs=None,
)  # fmt: skip
ORIGINAL = SHARED | dict(
    model_type="grounding-dino", architectures=["GroundingDinoForObjectDetection"], decoder_bbox_embed_share=True,
    two_stage_bbox_embed_share=False,
)  # fmt: skip
MM = SHARED | dict(
    model_type="mm-grounding-dino", architectures=["MMGroundingDinoForObjectDetection"], decoder_bbox_embed_share=False,
    decoder_cls_embed_share=False,
)  # fmt: skip
# Depths and heads of the tiny backbone are the library's own, which its file leaves out.
TINY = dict(model_type="swin", out_features=["stage2", "stage3", "stage4"], out_indices=[2, 3, 4])
BASE = swin(384, 12, 128, [2, 2, 18, 2], [4, 8, 16, 32], [2, 3, 4])
LARGE = swin(384, 12, 192, [2, 2, 18, 2], [6, 12, 24, 48], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("config", "zoo"),
    [
        (ORIGINAL | dict(backbone_config=TINY, num_feature_levels=4), "grounding_dino_swin_tiny"),
        (ORIGINAL | dict(backbone_config=BASE, num_feature_levels=4), "grounding_dino_swin_base"),
        (MM | dict(backbone_config=TINY, num_feature_levels=4), "mm_grounding_dino_swin_tiny"),
        (MM | dict(backbone_config=BASE, num_feature_levels=4), "mm_grounding_dino_swin_base"),
        (MM | dict(backbone_config=LARGE, num_feature_levels=5), "mm_grounding_dino_swin_large"),
    ],
)
def test_published_text_prompted_detectors_are_those_of_the_zoo(tmp_path, config, zoo):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 << 30)  # takes no space
    with torch.device("meta"):
        theirs, ours = (
            build_model(dict(find_model(name).config["model"], training_queries=[])) for name in (tmp_path, zoo)
        )
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (theirs, ours)]
    assert shapes[0] == shapes[1]
    assert theirs.head.class_embed[0].factor == ours.head.class_embed[0].factor
    assert theirs.backbone.feature_info == ours.backbone.feature_info


def test_many_class_names_are_read_in_time_that_grows_with_their_number(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {str(i): f"name {i // 2}" for i in range(100_000)}}))
    began = time.process_time()
    classes = transformers_folder.read_stated_classes(tmp_path / "config.json")["classes"]
    assert time.process_time() - began < 10  # minutes if each name was looked for among all
    assert classes[:2] == ["name 0 (0)", "name 0 (1)"] and len(set(classes)) == 100_000
