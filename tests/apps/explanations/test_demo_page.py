"""The demo's page: its event handlers without a browser; and the full page in one, if it is installed."""

import asyncio
import io
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.browser import chromium
from helpers.every_model import IMAGE, PROMPT, dense_model
from PIL import Image

from vitkit import build_model, load_config
from vitkit.apps.explanations.demo_page import HINT, Demo, Handlers, OwnAddressOnly, point_in, tasks_of, text_of
from vitkit.apps.inference import MaskFiller, Predictor, Translator, load
from vitkit.config import save_config
from vitkit.errors import ConfigError
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import demo
from vitkit.weights import save_checkpoint

SMALL = dict(d_model=32, num_heads=2, d_ffn=64)


def save_run(folder, name, classes=("disc", "ring"), change=None, vocabularies=None):
    """Write the run of a small quickstart model whose weights are random; return its folder."""
    config = load_config(f"quickstart/{name}")
    if change is not None:
        change(config["model"])
    torch.manual_seed(0)
    model = build_model(config["model"], classes=list(classes), vocabularies=vocabularies or {})
    state = {"model": model.state_dict(), "classes": list(classes), "config": json.dumps(config)}
    if "panoptic" in name:
        state["things"] = [True] * len(classes)
    if vocabularies:
        state |= {"classes": None, "vocabularies": {side: v.to_json() for side, v in vocabularies.items()}}
    save_checkpoint(folder / name / "best.pth", state)
    save_config(config, folder / name / "config.json")
    return folder / name


def small_detr(model):
    model["backbone"]["base_channels"] = 64  # whose random weights find nothing in noise
    model["neck"]["out_channels"] = 32
    model["head"].update(SMALL, num_encoder_layers=1, num_decoder_layers=1)


def small_mask2former(model):
    model["neck"].update(out_channels=32, mask_channels=16, num_layers=1, num_heads=2)
    model["head"].update(SMALL, num_decoder_layers=3)


def small_captioner(model):
    model.update(SMALL, num_decoder_layers=1, decoding=dict(min_length=2, max_length=3))


@pytest.fixture
def photo(tmp_path):
    """Return an image file of 70 x 50 pixels, which drawings enlarge seven times."""
    path = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def detr(tmp_path):
    return save_run(tmp_path, "detr", change=small_detr)


def handlers_of(run, folder):
    """Return the page's event handlers for a run's model; updates of controls are plain dicts."""
    return Handlers(Demo(load(run), folder), SimpleNamespace(update=lambda **changes: changes))


def size_of(path):
    return Image.open(path).size


def test_detector_responds_and_shows_its_slider(detr, photo, tmp_path):
    handlers = handlers_of(detr, tmp_path)
    prediction, drawn, answer, task, threshold, looked, *figures = handlers.on_image(str(photo), None)
    assert size_of(drawn) == (490, 350) and answer.startswith("noise.png: nothing from score 0.50")
    assert task == {"choices": ["detection"], "value": "detection", "visible": False}
    assert threshold == {"visible": True} and looked == HINT
    assert figures == [{"value": None, "visible": False}] * 2
    before = np.asarray(Image.open(drawn))
    redrawn, answer = handlers.on_choice(prediction, "detection", 0.0)
    assert answer.endswith("; from score 0.00 (as asked for)")
    assert (np.asarray(Image.open(redrawn)) != before).any()
    # The next image is drawn with the chosen threshold.
    assert "from score 0.00 (as asked for)" in handlers.on_image(str(photo), 0.0)[2]


@pytest.mark.parametrize(("is_drawn", "pixel"), [(False, (30, 20)), (True, (210, 140))])
def test_click_shows_what_the_point_and_its_query_attend_to(detr, photo, tmp_path, is_drawn, pixel):
    handlers = handlers_of(detr, tmp_path)
    prediction = handlers.on_image(str(photo), None)[0]
    text, encoder, query = handlers.on_click(prediction, 0.0, pixel, is_drawn=is_drawn)
    assert text.startswith("Point x 30, y 20: its attention in the encoder. ")
    assert encoder["visible"] and size_of(encoder["value"])[0] > 500
    # The weights are random, so a box may or may not cover the point.
    assert ("covers it (" in text) == query["visible"] == ("No query's box" not in text)
    outside = handlers.on_click(prediction, 0.0, (30, 2000), is_drawn=True)
    assert outside == [HINT, *[{"value": None, "visible": False}] * 2]


def test_masks_can_be_shown_as_boxes_and_their_query_is_found(tmp_path, photo):
    run = save_run(tmp_path, "mask2former_instance", change=small_mask2former)
    handlers = handlers_of(run, tmp_path)
    prediction, drawn, _, task, threshold, *_ = handlers.on_image(str(photo), 0.0)
    assert task == {"choices": ["instance", "detection"], "value": "instance", "visible": True}
    assert threshold == {"visible": True}
    as_boxes, _ = handlers.on_choice(prediction, "detection", 0.0)
    assert size_of(as_boxes) == (490, 350) and size_of(drawn)[1] > 350  # masks have a legend
    texts = [handlers.on_click(prediction, 0.0, (x, 20), is_drawn=False)[0] for x in (5, 35, 65)]
    assert all("encoder" not in text for text in texts) and any("covers it (" in text for text in texts)


def test_a_panoptic_map_has_a_threshold(tmp_path, photo):
    run = save_run(tmp_path, "mask2former_panoptic", change=small_mask2former)
    _, _, _, task, threshold, *_ = handlers_of(run, tmp_path).on_image(str(photo), None)
    assert task["value"] == "panoptic" and threshold == {"visible": True}


def test_a_model_without_attention_says_so_in_the_page(tmp_path, photo):
    handlers = handlers_of(save_run(tmp_path, "classifier"), tmp_path)
    prediction, _, answer, task, threshold, *_ = handlers.on_image(str(photo), None)
    assert answer.startswith("noise.png: ") and "disc 0." in answer
    assert not task["visible"] and not threshold["visible"]
    text, *figures = handlers.on_click(prediction, None, (3, 3), is_drawn=False)
    assert text.startswith("ResNet has no attention in the image that can be drawn")
    assert figures == [{"value": None, "visible": False}] * 2


def test_a_captioner_shows_what_it_looks_at_for_each_word(tmp_path, photo):
    vocabulary = Vocabulary("word", ["<pad>", "<unk>", "<s>", "</s>", "▁a", "▁red", "▁ring"])
    run = save_run(tmp_path, "captioning", change=small_captioner, vocabularies={"target": vocabulary})
    handlers = handlers_of(run, tmp_path)
    prediction, _, answer, *_ = handlers.on_image(str(photo), None)
    assert set(answer.removeprefix("noise.png: ").split()) <= {"a", "red", "ring"}
    text, encoder, words = handlers.on_click(prediction, None, (3, 3), is_drawn=False)
    assert "for each word" in text and not encoder["visible"] and words["visible"]


def test_a_text_prompted_detector_shows_what_its_query_reads(tmp_path):
    predictor = Predictor(dense_model("GroundingDINO"), ())
    with pytest.raises(ConfigError, match="--text: GroundingDINO looks for what it names. Give 'a red car"):
        demo.with_text(predictor, None)
    predictor = demo.with_text(predictor, PROMPT)
    box = predictor(IMAGE, threshold=0.0).boxes[0]
    x, y = ((box[:2] + box[2:]) / 2).clamp(min=0).tolist()
    point = min(x, IMAGE.shape[1] - 1), min(y, IMAGE.shape[0] - 1)
    attended = Demo(predictor, tmp_path).attend(predictor(IMAGE), *point, 0.0)
    assert "covers it (" in attended.text and attended.encoder.is_file() and attended.query.is_file()
    detector = Predictor(dense_model("DINO"), list("abc"))
    assert demo.with_text(detector, None) is detector
    with pytest.raises(ConfigError, match="takes no text"):
        demo.with_text(detector, "a .")


def test_broken_image_is_reported_and_clears_the_page(detr, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    handlers = handlers_of(detr, tmp_path)
    prediction, drawn, answer, task, threshold, *clicked = handlers.on_image(str(tmp_path / "broken.jpg"), None)
    assert prediction is drawn is None and answer.startswith("error: input: cannot decode 'broken.jpg' (")
    assert not task["visible"] and not threshold["visible"] and clicked[0] == ""
    assert handlers.on_image(None, None)[:3] == [None, None, ""]
    assert handlers.on_choice(None, "detection", 0.5) == [None, ""]
    assert handlers.on_click(None, None, (3, 3), is_drawn=True)[0] == "Give an image first."


def damaged(kind, folder):
    """Write an upload that is not an image; return its path."""
    path, data = folder / f"{kind}.png", io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)).save(data, format="PNG")
    photo = data.getvalue()
    # The header of a PNG says its size in bytes 16 to 23, and has a checksum in the following four.
    size = struct.pack(">II", 60_000, 60_000)
    header = b"IHDR" + size + photo[24:29]
    contents = {
        "empty": b"",
        "text": b"<html>no image</html>",
        "truncated": photo[: len(photo) // 2],
        "huge": photo[:12] + header + struct.pack(">I", zlib.crc32(header)) + photo[33:],
    }
    path.write_bytes(contents[kind])
    return path


@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "huge"])
def test_a_damaged_upload_gives_one_line_in_the_page(detr, tmp_path, kind):
    prediction, drawn, answer, *_ = handlers_of(detr, tmp_path).on_image(str(damaged(kind, tmp_path)), None)
    assert prediction is drawn is None
    assert answer.startswith("error: ") and f"{kind}.png" in answer and "\n" not in answer


def test_the_example_is_an_image_that_can_be_predicted_on(detr, tmp_path):
    handlers = handlers_of(detr, tmp_path)
    prediction, drawn, answer, *_ = handlers.on_image(str(handlers.demo.example()), None)
    assert prediction.image.shape == (320, 320, 3) and drawn is not None and answer.startswith("example.png: ")


def test_old_drawings_are_removed(detr, photo, tmp_path):
    folder = tmp_path / "drawings"
    folder.mkdir()
    page = Demo(load(detr), folder)
    prediction = page.predict(photo)
    for _ in range(70):
        page.draw(prediction, None, None)
    assert len(list(folder.glob("*.jpg"))) == 64
    assert tasks_of(prediction) == ["detection"] and "nothing from" in text_of(prediction, None)
    assert point_in(prediction, (489, 349), is_drawn=True) == (489 / 7, 349 / 7)
    assert point_in(prediction, (70, 3), is_drawn=False) is None


def fails(*args):
    with pytest.raises(SystemExit) as error:
        demo.main([*map(str, args), "--device", "cpu"])
    return str(error.value.code)


def test_a_missing_gradio_is_named_with_its_remedy(detr, monkeypatch, free_port):
    monkeypatch.setitem(sys.modules, "gradio", None)
    message = fails(detr, "--port", free_port)
    assert message.startswith("error: the page needs Gradio (") and message.endswith("pip install 'vitkit[demo]'.")


@pytest.fixture
def free_port():
    """Return a port that stays free until it is used: systems give those above to whoever connects or asks for any."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port")


def test_a_busy_port_is_named_before_anything_is_loaded(free_port, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        message = fails("no_such_model", "--port", free_port)
    assert f"--port {free_port}: cannot be served on (Address already in use). Choose another --port" in message
    assert "--host 192.0.2.1" in fails("no_such_model", "--host", "192.0.2.1", "--port", free_port)
    with pytest.raises(SystemExit):
        demo.main(["no_such_model", "--port", "0"])
    assert "--port 0: expected 1 to 65535" in capsys.readouterr().err


def test_text_and_clip_models_are_referred_to_other_tools():
    with pytest.raises(demo.ConfigError, match=r"runs/x: reads text, not images\. Use vitkit translate"):
        demo.check_model(object.__new__(Translator), "runs/x")
    with pytest.raises(demo.ConfigError, match=r"runs/x: reads text, not images\. Use vitkit generate"):
        demo.check_model(object.__new__(MaskFiller), "runs/x")


@pytest.fixture
def served(detr, tmp_path, monkeypatch, free_port):
    """Run the tool in this thread, and a function with the page's URL in another; then ctrl-C ends the tool."""
    pytest.importorskip("gradio")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    terminate, interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    connect, outside = socket.socket.connect, []

    def connect_here(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            outside.append(address)
            raise OSError("no network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    is_waiting = threading.Event()

    wait = demo.wait_for_ctrl_c

    def said_and_wait():
        is_waiting.set()
        wait()

    monkeypatch.setattr(demo, "wait_for_ctrl_c", said_and_wait)

    def serve(visit):
        results = []

        def visit_and_end():
            try:
                assert is_waiting.wait(60), "the tool serves no page"
                results.append(visit(f"http://127.0.0.1:{free_port}/"))
            except BaseException as error:  # raised again below, in the test's own thread
                results.append(error)
            finally:
                if is_waiting.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        visitor = threading.Thread(target=visit_and_end)
        visitor.start()
        demo.main([str(detr), "--port", str(free_port), "--device", "cpu"])
        visitor.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        assert outside == [] and list(folder.iterdir()) == []
        return results[0]

    yield serve
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, interrupt)


def respond(host, headers, kind="http", server="127.0.0.1"):
    """Return the status and the text of the response to a request to a page that is served on a host."""
    sent = []

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "headers": raw, "server": (server, 7860)}
    asyncio.run(OwnAddressOnly(answer, host)(scope, None, send))
    return (sent[0]["status"], sent[1]["body"].decode()) if kind == "http" else sent


@pytest.mark.parametrize(
    ("served_on", "asked", "server"),
    [
        ("127.0.0.1", "127.0.0.1:7860", "127.0.0.1"),
        ("127.0.0.1", "localhost:7860", "127.0.0.1"),
        ("127.0.0.1", "localhost:9000", "127.0.0.1"),  # a port that SSH forwards
        ("localhost", "LocalHost.:7860", "127.0.0.1"),
        ("::1", "[::1]:7860", "::1"),
        ("[::1]", "localhost:7860", "::1"),
        ("lab7", "lab7:7860", "10.0.0.5"),
        ("lab7", "10.0.0.5:7860", "10.0.0.5"),
        ("10.0.0.5", "10.0.0.5:7860", "10.0.0.5"),
        ("0.0.0.0", "10.0.0.5:7860", "172.17.0.2"),  # a container's port
        ("0.0.0.0", socket.gethostname(), "10.0.0.5"),
        ("::", "[fe80::1]:7860", "fe80::2"),
    ],
)
def test_page_answers_on_its_own_address_to_itself(served_on, asked, server):
    assert respond(served_on, {"host": asked}, server=server) == (200, "page")
    assert respond(served_on, {"host": asked, "origin": f"http://{asked}"}, server=server) == (200, "page")


@pytest.mark.parametrize(
    ("served_on", "asked"),
    [
        ("127.0.0.1", "evil.example:7860"),
        ("127.0.0.1", "127.0.0.1.evil.example"),
        ("127.0.0.1", "localhost@evil.example"),
        ("127.0.0.1", "[127.0.0.1"),
        ("127.0.0.1", "10.0.0.5:7860"),
        ("127.0.0.1", ""),
        ("0.0.0.0", "evil.example:7860"),
        ("lab7", "localhost:7860"),
    ],
)
def test_a_foreign_host_is_refused_in_one_sentence(served_on, asked):
    status, text = respond(served_on, {"host": asked})
    assert status == 400 and text.startswith(f"This page is served on {served_on}, not on {asked!r}. Start vitkit demo")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:7860", "http://127.0.0.1:8888", "http://127.0.0.1:7860.evil"],
)
def test_a_page_of_another_origin_is_refused(origin):
    headers = {"host": "127.0.0.1:7860", "origin": origin}
    status, text = respond("127.0.0.1", headers)
    assert status == 403 and text == f"This page answers only requests from itself, not from a page of {origin!r}.\n"
    assert respond("127.0.0.1", headers, kind="websocket")[0]["type"] == "websocket.close"


def visit_as(url, host=None, origin=None, method="GET"):
    """Return the status, the headers and the text of a response to a browser's request."""
    headers = {"Host": host, "Origin": origin, "Access-Control-Request-Method": origin and "POST"}
    request = urllib.request.Request(
        url, headers={name: value for name, value in headers.items() if value is not None}, method=method
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def test_page_refuses_other_websites(served):
    def visit(url):
        foreign = dict(origin="https://evil.example")
        preflight = visit_as(url, **foreign, method="OPTIONS")
        rebound = visit_as(url, host="evil.example", origin="http://evil.example", method="OPTIONS")
        return visit_as(url), visit_as(url, origin=url[:-1]), visit_as(url, **foreign), preflight, rebound

    page, own, foreign, preflight, rebound = served(visit)
    assert page[0] == own[0] == 200 and "<html" in page[2]
    for status, headers, text in (foreign, preflight):
        assert status == 403 and text.startswith("This page answers only requests from itself, not from a page of ")
        assert not any(name.lower().startswith("access-control") for name in headers)
    assert rebound[0] == 400 and "not on 'evil.example'" in rebound[2]


def test_page_is_served_only_locally_and_ends_at_ctrl_c(served, capsys):
    html = served(lambda url: urllib.request.urlopen(url).read().decode())
    assert "fonts.googleapis.com" not in html and '<script src="http' not in html
    printed = capsys.readouterr().out
    assert "in a browser on this machine; ctrl-C ends it" in printed and printed.endswith("ended\n")


def visit_page(url, browser_path, photo, shots):
    """Upload an image, click it, move the slider; return the page's texts, and its requests to other hosts."""
    from playwright.sync_api import sync_playwright

    errors, requests, said = [], [], {}
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu", "--single-process", "--no-zygote"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        said["title"] = page.locator("h1").inner_text()
        page.locator("#example button, #example tr.tr-body").first.click()
        page.wait_for_function("document.querySelector('#answer textarea')?.value.startsWith('example.png')")
        page.locator("#image button[aria-label='Remove Image'], #image button[aria-label='Clear']").first.click()
        page.set_input_files("#image input[type=file]", str(photo))
        page.wait_for_function("document.querySelector('#answer textarea')?.value.startsWith('noise.png')")
        said["answer"] = page.input_value("#answer textarea")
        page.wait_for_selector("#drawn img")
        slider = page.locator("#threshold input[type=range]")
        said["slider"] = slider.input_value()
        slider.focus()
        for _ in range(50):
            page.keyboard.press("ArrowLeft")
        page.wait_for_function("document.querySelector('#answer textarea').value.includes('0.00')")
        said["moved"] = page.input_value("#answer textarea")
        drawn = page.locator("#drawn img").first
        size = drawn.bounding_box()
        drawn.click(position={"x": size["width"] * 0.5, "y": size["height"] * 0.4})
        page.wait_for_selector("#encoder img")
        said["looked"] = page.input_value("#looked textarea")
        page.screenshot(path=str(shots / "page.png"), full_page=True)
        browser.close()
    said["others"] = [other for other in requests if not other.startswith((url, "data:", "blob:"))]
    return said | {"errors": errors}


def test_the_page_works_in_a_browser(served, photo, tmp_path):
    pytest.importorskip("playwright")
    browser_path = chromium()
    if browser_path is None:
        pytest.skip("no Chromium here: install one, or name it in VITKIT_CHROMIUM")
    said = served(lambda url: visit_page(url, browser_path, photo, tmp_path))
    assert said["title"].startswith("vitkit demo: ") and said["title"].endswith("detr")
    assert said["errors"] == [] and said["others"] == []
    assert said["answer"].startswith("noise.png: nothing from score 0.50")
    assert said["slider"] == "0.5" and "from score 0.00 (as asked for)" in said["moved"]
    assert said["looked"].startswith("Point x 35, y 20: its attention in the encoder.")
    assert (tmp_path / "page.png").stat().st_size > 20_000
