"""Try a model in the browser: give it an image or the camera, move the threshold, click to see what it attends to.

MODEL is a name of the model zoo, the folder or a checkpoint of a run, or a config, whose weights follow it: a
classifier, a captioner, a detector or a mask model. A click shows the encoder's attention at that point, and the
attention of the query whose box or mask covers the point; for a captioner, the attention of each word; for a
text-prompted detector, also what the query reads in --text and the probability of each word.

The page is served only on this machine (see --host), answers no other website, loads nothing from elsewhere and reports
nothing. Its images are in a temporary folder until it ends, by ctrl-C. It needs Gradio: pip install 'vitkit[demo]'.

Examples:
    vitkit demo detr_r50
    vitkit demo grounding_dino_swin_tiny --text "cat . dog ."
    vitkit demo runs/mask2former --port 7861 --device cuda
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vitkit.errors import ConfigError
from vitkit.tools.common import add_device, add_model, add_trust, errors_in_one_line, require_images, sort_model

if TYPE_CHECKING:
    from vitkit.apps.inference import Loaded, Predictor


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--text", metavar="TEXT", help="what a text-prompted detector looks for: 'a red car. a dog.'")
    parser.add_argument("--host", default="127.0.0.1", help="host to serve on (default: 127.0.0.1, only this machine)")
    parser.add_argument("--port", type=int, default=7860, help="port to serve on (default: 7860)")
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    if not 0 < args.port < 65536:
        parser.error(f"--port {args.port}: expected 1 to 65535")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from vitkit.apps.inference import load
    from vitkit.logging import setup_logging

    with errors_in_one_line(), tempfile.TemporaryDirectory(prefix="vitkit_demo_") as folder:
        setup_logging()
        check_port(args.host, args.port)
        gradio = import_gradio(Path(folder) / "uploads")
        predictor = load(args.model, args.weights, overrides=args.overrides, trust=args.trust, device=args.device)
        check_model(predictor, args.model)
        predictor = with_text(predictor, args.text)
        print(predictor.report)
        serve(predictor, args.model, gradio, Path(folder), host=args.host, port=args.port)


def serve(predictor: Loaded, name: str, gradio: ModuleType, folder: Path, *, host: str, port: int) -> None:
    """Serve a model's page until ctrl-C."""
    from vitkit.apps.explanations.demo_page import Demo, build_page, launch

    page = build_page(Demo(predictor, folder), name, gradio)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        url = launch(page, gradio, host, port)
        print(f"open {url} in a browser on this machine; ctrl-C ends it", flush=True)
        wait_for_ctrl_c()
    except KeyboardInterrupt:
        print("ended")
    finally:
        page.close(verbose=False)


def wait_for_ctrl_c() -> None:
    """Block until a KeyboardInterrupt."""
    threading.Event().wait()


def check_port(host: str, port: int) -> None:
    """Raise a ConfigError if the page cannot be served at this host and port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot be served on ({error.strerror}). Choose another --port, or end the "
            "program that uses this one."
        ) from error


def check_model(predictor: Loaded, name: str) -> None:
    """Raise a ConfigError if a model does not take images."""
    require_images(predictor, name)
    if predictor.sampling is not None:
        raise ConfigError(f"{name}: classifies videos, not images. Use vitkit predict.")


def with_text(predictor: Predictor, text: str | None) -> Predictor:
    """Return a predictor that looks for the objects of a text, if its model is text-prompted.

    Raises:
        ConfigError: the model takes a text and there is none, or the reverse.
        DataError: the text is not a prompt.
    """
    if text is not None:
        predictor = predictor.with_text(text)
    elif "text" in predictor.model.takes and predictor.text is None:
        raise ConfigError(f"--text: {type(predictor.model).__name__} looks for what it names. Give 'a red car. a dog.'")
    return predictor


def import_gradio(uploads: Path) -> ModuleType:
    """Import Gradio, set to store uploaded images in a folder and to send no usage reports.

    Raises:
        ConfigError: Gradio is not installed.
    """
    os.environ |= {
        "GRADIO_TEMP_DIR": str(uploads),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    try:
        import gradio
    except ImportError as error:
        raise ConfigError(f"the page needs Gradio ({error}). Install it: pip install 'vitkit[demo]'.") from error
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return gradio


if __name__ == "__main__":
    main()
