"""The page of `vitkit demo`: the layout and the events of its controls."""

import html
import ipaddress
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from PIL import Image

from vitkit.apps.explanations.drawing import draw_word_attention
from vitkit.apps.explanations.images import (
    ImageAttention,
    attention_layers,
    image_attention,
    image_sampling,
    samples_points,
)
from vitkit.apps.explanations.prompt_attention import prompt_attention
from vitkit.apps.explanations.prompts import draw_box_words
from vitkit.apps.explanations.text import word_attention
from vitkit.apps.inference import FIELDS, Prediction, Predictor
from vitkit.apps.visualization.canvas import enlarge
from vitkit.data.synthetic.world import World
from vitkit.errors import VitkitError
from vitkit.structures import ScoreThresholds

KEPT_FILES = 64
"""The number of drawings that the page's folder keeps, the newest ones."""
KEPT_SECONDS = 3600
"""The number of seconds for which a visitor's images and predictions are kept without a visit."""
MAX_UPLOAD = "256mb"
"""The largest file that a visitor can send; an image of the maximum number of decoded pixels is smaller as a JPEG."""
FONTS = ("system-ui", "sans-serif")
HINT = "Click a point in one of the images to see what the model attends to."
STEPS = (
    "Give an image, or click the example below it; then click a point in the image to see what the model attends to."
)
EXAMPLE_WORLD = World(image_size=320, min_objects=3, max_objects=4, split="val")


class Attended(NamedTuple):
    """The model's attention for one point of an image."""

    text: str
    encoder: Path | None = None
    """A drawing of what the point attends to in the encoder; for a text-prompted detector, of what the query that
    covers it reads."""
    query: Path | None = None
    """A drawing of what the query that covers the point attends to; for a captioner, of what each word attends to."""


@dataclass
class Demo:
    """Predicts and draws for the page.

    Args:
        predictor: an image model's predictor.
        folder: where drawings are saved.
    """

    predictor: Predictor
    folder: Path
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(KEPT_FILES)))

    def example(self) -> Path:
        """Return the file of the example image, which is saved anew: a scene of the synthetic world."""
        path = self.folder / "example.png"
        Image.fromarray(EXAMPLE_WORLD.scene(0).image).save(path)
        return path

    def predict(self, path: str | Path) -> Prediction:
        """Predict on an image's file.

        Raises:
            DataError: the file is not an image.
        """
        path = Path(path)
        return next(self.predictor.stream([(path.name, path.read_bytes())]))

    def draw(self, prediction: Prediction, task: str | None, threshold: float | None) -> Path:
        """Draw a prediction.

        Args:
            task: one of the prediction's `tasks_of`; None: the first.
            threshold: the lowest score to draw; None: the model's thresholds.
        """
        path = self._file("jpg")
        prediction.save(path, task=task, score_threshold=threshold)
        return path

    def attend(self, prediction: Prediction, x: float, y: float, threshold: float | None) -> Attended:
        """Draw what the model attends to for a point (x, y), in pixels of the image.

        Raises:
            ConfigError: the model has no attention that can be drawn.
        """
        predictor, image = self.predictor, prediction.image
        if "text" in predictor.model.returns:
            return self._attend_by_words(prediction)
        attention_of = image_sampling if samples_points(predictor.model) else image_attention
        view = attention_of(predictor, image)
        encoder = query = None
        text = f"Point x {x:.0f}, y {y:.0f}: "
        if isinstance(view, ImageAttention) and view.encoder is not None:
            encoder = self._file("png")
            view.draw_points([(x, y)], encoder)
            text += "its attention in the encoder. "
        if view.queries is not None:
            minimum = prediction.thresholds if threshold is None else ScoreThresholds(threshold)
            number = view.queries.at((x, y), minimum)
            if number is None:
                text += "No query's box or mask covers it."
            else:
                query = self._file("png")
                view.draw_query(number, query)
                name, score = predictor.classes[view.queries.labels[number]], float(view.queries.scores[number])
                text += f"Query {number} covers it ({name} {score:.2f}), and attends to what is drawn."
                if attention_layers(predictor.model).prompt:
                    encoder = self._file("png")
                    words, _ = prompt_attention(predictor, image)
                    draw_box_words(view.image, words, view.queries, [number], encoder)
        return Attended(text.strip(), encoder, query)

    @torch.inference_mode()
    def _attend_by_words(self, prediction: Prediction) -> Attended:
        """Draw what a captioner attends to for each word, which does not depend on the point."""
        model = self.predictor.model
        inputs = self.predictor.prepare([prediction.image]).to(self.predictor.device).inputs
        words, weights = word_attention(model, inputs)
        if not words:
            return Attended("The caption is empty: it has no word to explain.")
        path, seen = self._file("png"), inputs["images"][0].permute(1, 2, 0).cpu().numpy()
        draw_word_attention(seen, words, weights, path)
        return Attended("A captioner attends to the image anew for each word, whichever point is clicked.", query=path)

    def _file(self, ending: str) -> Path:
        return self.folder / f"{next(self._numbers)}.{ending}"


def tasks_of(prediction: Prediction) -> list[str]:
    """Return the tasks of a prediction that can be drawn, the default first."""
    return [task for task, name in FIELDS.items() if name in prediction.fields]


def text_of(prediction: Prediction, threshold: float | None) -> str:
    """Return a line that says what is drawn at a score threshold; None: at the model's thresholds."""
    return (prediction if threshold is None else prediction.filter(score=threshold)).summary()


def point_in(prediction: Prediction, pixel: tuple[float, float], *, is_drawn: bool) -> tuple[float, float] | None:
    """Return the point (x, y) of an image that was clicked; None outside of it.

    Args:
        pixel: (x, y) in the image or in its drawing, which may be larger and have a legend below.
        is_drawn: whether the drawing was clicked.
    """
    factor = enlarge(prediction.image)[1] if is_drawn else 1
    x, y = (value / factor for value in pixel)
    height, width = prediction.image.shape[:2]
    return (x, y) if 0 <= x < width and 0 <= y < height else None


class Handlers:
    """The page's event handlers, from values of its controls to their updates. Errors are shown in the page."""

    def __init__(self, demo: Demo, gr: ModuleType):
        self.demo, self.gr = demo, gr

    def on_image(self, path: str | None, threshold: float | None) -> list[Any]:
        """Predict; return the prediction, and updates of drawing, answer, task, threshold and a click's outputs."""
        gr = self.gr
        hidden = [gr.update(visible=False)] * 2
        if path is None:
            return [None, None, "", *hidden, *self._clear_click("")]
        try:
            prediction = self.demo.predict(path)
        except VitkitError as error:
            return [None, None, f"error: {error}", *hidden, *self._clear_click("")]
        tasks = tasks_of(prediction)
        return [
            prediction,
            self.demo.draw(prediction, None, threshold),
            text_of(prediction, threshold),
            gr.update(choices=tasks, value=tasks[0], visible=len(tasks) > 1),
            gr.update(visible="scores" in prediction.fields or "panoptic" in prediction.fields),
            *self._clear_click(HINT),
        ]

    def on_choice(self, prediction: Prediction | None, task: str | None, threshold: float | None) -> list[Any]:
        """Draw again with another task or threshold; return the drawing and the answer."""
        if prediction is None:
            return [None, ""]
        return [self.demo.draw(prediction, task or None, threshold), text_of(prediction, threshold)]

    def on_click(
        self, prediction: Prediction | None, threshold: float | None, pixel: tuple[float, float], *, is_drawn: bool
    ) -> list[Any]:
        """Draw what the model attends to; return updates of the text and of the two drawings."""
        if prediction is None:
            return self._clear_click("Give an image first.")
        point = point_in(prediction, pixel, is_drawn=is_drawn)
        if point is None:
            return self._clear_click(HINT)
        try:
            attended = self.demo.attend(prediction, *point, threshold)
        except VitkitError as error:
            return self._clear_click(str(error))
        drawings = [self.gr.update(value=path, visible=path is not None) for path in attended[1:]]
        return [attended.text, *drawings]

    def _clear_click(self, text: str) -> list[Any]:
        return [text, *[self.gr.update(value=None, visible=False)] * 2]


def build_page(demo: Demo, name: str, gr: ModuleType) -> Any:
    """Lay out the page of a model, whose name is shown; return Gradio's `Blocks`."""
    handlers = Handlers(demo, gr)
    # Gradio's button that shares an image with everybody is left out.
    shown = dict(interactive=False, buttons=["download", "fullscreen"])
    with gr.Blocks(title=f"vitkit: {name}", analytics_enabled=False, delete_cache=(600, KEPT_SECONDS)) as page:
        gr.HTML(f"<h1>vitkit demo: {html.escape(name)}</h1><p>{STEPS}</p>", elem_id="title")
        prediction = gr.State(time_to_live=KEPT_SECONDS)
        chosen = gr.State()  # the threshold once the slider was moved; until then, the model's threshold of each class
        with gr.Row():
            with gr.Column():
                source = gr.Image(
                    label="Image",
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "webcam", "clipboard"],
                    webcam_options=gr.WebcamOptions(mirror=False),
                    buttons=["fullscreen"],
                    elem_id="image",
                )
                # The file is passed on unchanged: vitkit's reader turns it upright and reports errors in it.
                source.preprocess = lambda payload: None if payload is None else payload.path
                path = str(demo.example())
                example = gr.Dataset(components=[source], samples=[[path]], label="Example", elem_id="example")
                example.click(lambda: path, outputs=source, queue=False, api_visibility="private")
                task = gr.Radio([], label="Show", visible=False, elem_id="task")
                threshold = gr.Slider(
                    0,
                    1,
                    value=round(demo.predictor.thresholds.overall, 2),
                    step=0.01,
                    label="Minimum score",
                    info=f"at first: {demo.predictor.thresholds}",
                    visible=False,
                    elem_id="threshold",
                )
            with gr.Column():
                drawn = gr.Image(label="Prediction", elem_id="drawn", **shown)
                answer = gr.Textbox(label="Found", interactive=False, elem_id="answer")
                looked = gr.Textbox(label="What it attends to", interactive=False, elem_id="looked")
        with gr.Row():
            encoder = gr.Image(label="Encoder", show_label=False, visible=False, elem_id="encoder", **shown)
            query = gr.Image(label="Decoder", show_label=False, visible=False, elem_id="query", **shown)
        clicked = [looked, encoder, query]

        # One event at a time: recording attention changes how the model runs.
        one_at_a_time = dict(concurrency_id="model", concurrency_limit=1, api_visibility="private")
        source.change(
            handlers.on_image, [source, chosen], [prediction, drawn, answer, task, threshold, *clicked], **one_at_a_time
        )
        redraw = dict(fn=handlers.on_choice, outputs=[drawn, answer], trigger_mode="always_last", **one_at_a_time)
        threshold.input(lambda value: value, threshold, chosen, queue=False, api_visibility="private")
        threshold.input(inputs=[prediction, task, threshold], **redraw)
        task.input(inputs=[prediction, task, chosen], **redraw)
        for image, is_drawn in ((source, False), (drawn, True)):
            image.select(_click_of(gr, handlers, is_drawn), [prediction, chosen], clicked, **one_at_a_time)
    return page


def _click_of(gr: ModuleType, handlers: Handlers, is_drawn: bool) -> Callable[..., list[Any]]:
    """Return the handler of clicks in an image; Gradio finds the event by the type of its argument."""

    def on_click(prediction: Prediction | None, threshold: float | None, event: gr.SelectData) -> list[Any]:
        return handlers.on_click(prediction, threshold, tuple(event.index), is_drawn=is_drawn)

    return on_click


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class OwnAddressOnly:
    """An ASGI application that passes on requests to the page's own address, from its own page or from no page.

    Any website that is open in a visitor's browser can send requests to this machine, and reads the answers if a name
    of its own leads here (DNS rebinding) or if the server allows its origin. The Host and Origin headers, which a
    browser sets itself, tell such requests.

    Args:
        app: the ASGI application that answers.
        host: the name or address that the page is served on. On all addresses (0.0.0.0, ::), a Host may be any
            address or a name of this machine: an address cannot lead elsewhere.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], host: str):
        self.app, self.host = app, host
        self.names = {_hostname(host if host.startswith("[") or ":" not in host else f"[{host}]")}
        address = _address(host)
        self.takes_addresses = address is not None and address.is_unspecified
        if self.takes_addresses:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        if self.takes_addresses or host == "localhost" or (address is not None and address.is_loopback):
            self.names |= {"localhost", "127.0.0.1", "::1"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["type"] == "lifespan" else self.refuse(scope)
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[1]})
        else:
            status, text = refused
            content_type = (b"content-type", b"text/plain; charset=utf-8")
            await send({"type": "http.response.start", "status": status, "headers": [content_type]})
            await send({"type": "http.response.body", "body": f"{text}\n".encode()})

    def refuse(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and the sentence that a request is refused with; None: it is answered."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        name, address = _hostname(host), _address(_hostname(host))
        is_own = name in self.names or name == (scope.get("server") or ("",))[0]
        if not (is_own or (self.takes_addresses and address is not None)):
            return 400, (
                f"This page is served on {self.host}, not on {host!r}. Start vitkit demo with --host to serve it on "
                "another address of this machine."
            )
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            return 403, f"This page answers only requests from itself, not from a page of {origin!r}."
        return None


def _hostname(host: str) -> str:
    """Return the name or address of a Host header, without port and brackets; empty: it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host's name is; None: it is a name."""
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def launch(page: Any, gr: ModuleType, host: str, port: int) -> str:
    """Serve a page until its `close`, without blocking; it loads nothing from and sends nothing to other machines."""

    @asynccontextmanager
    async def guard(app: Any) -> AsyncIterator[None]:
        # Outside of all that Gradio has built by now, which allows the origins of other pages; before any request.
        app.middleware_stack = OwnAddressOnly(app.middleware_stack, host)
        yield

    page.launch(
        app_kwargs=dict(lifespan=guard),
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
        inbrowser=False,
        max_file_size=MAX_UPLOAD,
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        footer_links=[],
        theme=gr.themes.Default(font=FONTS, font_mono=("ui-monospace", "monospace")),
    )
    return page.local_url
