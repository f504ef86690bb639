"""Repositories of the Hugging Face hub, as folders in its client's cache; interrupted downloads are continued.

The client lists files, and finds those of its cache. They are downloaded here, because the client takes what a server
names for names of files, does not compare checksums, and waits for a slow server without end.
"""

import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, errors, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.utils import build_hf_headers

from vitkit.errors import CheckpointError
from vitkit.weights.download import fetch_file
from vitkit.weights.marian import TARGET_NUMBERS, TOKEN_FILES
from vitkit.weights.tokenizer_files import LANGUAGE_MODELS, PROMPTED_MODELS, TOKENIZER
from vitkit.weights.transformers_folder import CONFIG, INDEX_SUFFIX, WEIGHTS, list_files_in_index, read_object

logger = logging.getLogger("vitkit")

PREFIX = "hf:"
PREPROCESSOR, GENERATION = "preprocessor_config.json", "generation_config.json"
_ENDPOINT: str | None = None
"""URL of the hub; None: the client's default, which HF_ENDPOINT overrides."""
_EXPLANATIONS = (
    (errors.HFValidationError, "not the name of a repository; expected hf:OWNER/NAME."),
    (errors.GatedRepoError, "access to it is gated. Accept its terms on its page, and log in: hf auth login."),
    (
        errors.RepositoryNotFoundError,
        "there is no such repository, or it is private. Check owner and name; if it is private, log in: hf auth login.",
    ),
    (errors.RevisionNotFoundError, "the repository has no revision {revision!r}."),
)
"""The client's errors, a derived class before its base, and what they mean."""
_CLIENT_ERRORS = (OSError, ValueError, FutureTimeout, *errors.HfHubHTTPError.__bases__)
"""What the client raises, with the base errors of its HTTP library, which the client's major versions change: requests,
httpx, httpx2. Most errors of the last two are not OSErrors."""
_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
"""What a server may name: a file, a version of it, a commit. They become names of files."""
_ANSWER_SECONDS = 60.0
"""Within which an answer without a file arrives: the client bounds the wait for each packet of it only."""


def is_hub_name(source: str) -> bool:
    """Whether a model's name refers to a repository, as "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION"."""
    return source.startswith(PREFIX)


def fetch_repository(source: str, check: Callable[[Path], Any] = lambda config: None) -> Path:
    """Return the local copy of a repository with a model of the transformers library, downloading it the first time.

    Args:
        source: see `is_hub_name`.
        check: called with the path of `config.json` before any weights are downloaded.
    Raises:
        CheckpointError: there is no such repository, it contains no model, or it cannot be reached or written.
    """
    repository = _Repository(source)
    folder = repository.download(CONFIG)
    if folder is None:
        raise CheckpointError(f"{source}: has no {CONFIG}, so it is not a model of the transformers library.")
    check(folder / CONFIG)
    weights = next((name for name in WEIGHTS if repository.has(name, folder)), None)
    if weights is None and repository.is_reachable:
        raise CheckpointError(f"{source}: has no weights: expected {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}.")
    repository.download(weights or WEIGHTS[0])  # raises if the hub cannot be reached and no weights are in the cache
    if weights.endswith(INDEX_SUFFIX):
        shards = list_files_in_index(folder / weights)
        for shard in shards:
            if repository.is_reachable and not repository.has(shard, folder):
                raise CheckpointError(f"{source}: {weights} names {shard}, which the repository lacks.")
        repository.download(*shards)
    others = {"marian": (GENERATION, *TOKEN_FILES, TARGET_NUMBERS)} | dict.fromkeys(LANGUAGE_MODELS, (TOKENIZER,))
    others |= dict.fromkeys(PROMPTED_MODELS, (PREPROCESSOR, TOKENIZER))
    repository.download(*others.get(read_object(folder / CONFIG).get("model_type"), (PREPROCESSOR,)), required=False)
    return folder


class _Repository:
    """A repository whose files are downloaded into the cache, or only taken from there if it cannot be reached."""

    def __init__(self, source: str):
        self.source = source
        self.name, _, revision = source.removeprefix(PREFIX).partition("@")
        self.revision = revision or None
        if not all(re.fullmatch(_PLAIN, part) for part in (revision or "main").split("/")):
            raise CheckpointError(f"{source}: {revision!r} is not a revision; expected a branch, a tag or a commit.")
        self.is_reachable = not constants.HF_HUB_OFFLINE
        self.files: list[str] = []
        self.endpoint = _ENDPOINT or constants.ENDPOINT
        try:
            if self.is_reachable:
                api, seconds = HfApi(self.endpoint), constants.HF_HUB_ETAG_TIMEOUT
                info = _answer(lambda: api.model_info(self.name, revision=self.revision, timeout=seconds))
                self.files = [file.rfilename for file in info.siblings or ()]
                self.commit = self._plain(info.sha, "a commit")
        except tuple(kind for kind, _ in _EXPLANATIONS) as error:
            raise self._explain(error, CONFIG) from error
        except CheckpointError:
            raise
        except _CLIENT_ERRORS:  # including a hub that is out of order
            self.is_reachable = False
        except (TypeError, LookupError, AttributeError, RecursionError) as error:  # inside the client
            raise self._refuse("the repository's files", f"{type(error).__name__}: {error}") from error

    def has(self, name: str, folder: Path) -> bool:
        """Whether the repository, or its local copy if it cannot be reached, has a file."""
        return name in self.files if self.is_reachable else (folder / name).is_file()

    def download(self, *names: str, required: bool = True) -> Path | None:
        """Download those of the files that the repository has; return the local folder, or None if it has none.

        Raises:
            CheckpointError: they cannot be downloaded; or they are required, and not in the cache of a repository that
                cannot be reached.
        """
        names = tuple(name for name in names if name in self.files or not self.is_reachable)
        if not names:
            return None
        try:
            if self.is_reachable:
                for name in names:
                    folder = self._fetch(name).parent
                return folder
            folder = snapshot_download(
                self.name, revision=self.revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
            )
            missing = [name for name in names if not Path(folder, name).is_file()]
            if missing and (required or len(missing) == len(names)):
                raise errors.LocalEntryNotFoundError(missing[0])
        except CheckpointError:
            raise
        except _CLIENT_ERRORS as error:
            if isinstance(error, errors.LocalEntryNotFoundError) and not required:
                logger.warning(
                    f"{self.source}: offline, and {' or '.join(names)} is not in the cache: continuing without it."
                )
                return None
            raise self._explain(error, names[0]) from error
        return Path(folder)

    def _fetch(self, name: str) -> Path:
        """Return a file's path in the client's cache, where it is stored as the client itself would; raise a
        CheckpointError if the server names what could leave the cache, or sends another content than it states."""
        storage = Path(constants.HF_HUB_CACHE, f"models--{self.name.replace('/', '--')}")
        path = storage / "snapshots" / self.commit / self._plain(name, "a file")
        if path.is_file():
            return path
        url = hf_hub_url(self.name, name, revision=self.commit, endpoint=self.endpoint)
        metadata = _answer(lambda: get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT))
        etag, place = self._plain(metadata.etag, f"the version of {name}"), urlsplit(metadata.location)
        if place.scheme not in ("http", "https"):
            raise self._refuse(f"the address of {name}", metadata.location)
        # The token is for the hub, not for where its files are.
        headers = build_hf_headers(token=None if place.netloc == urlsplit(url).netloc else False)
        checksum = f"sha256:{etag}" if re.fullmatch("[0-9a-f]{64}", etag) else None
        try:
            blob = fetch_file(
                metadata.location, checksum=checksum, name=etag, folder=storage / "blobs", headers=headers
            )
        except CheckpointError as error:
            if error.__cause__ is None:  # another checksum
                raise CheckpointError(f"{self.source}: {name}: {error}") from error
            raise self._explain(error.__cause__, name) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a system without links, or another process was first
            if not path.is_file():
                os.replace(blob, path)
        if self.revision != self.commit:  # by which the client finds the commit offline
            reference = storage / "refs" / (self.revision or constants.DEFAULT_REVISION)
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.commit, encoding="utf-8")
        return path

    def _plain(self, value: Any, what: str) -> str:
        """Return what a server names if it is a plain word."""
        if not (isinstance(value, str) and re.fullmatch(_PLAIN, value)):
            raise self._refuse(what, value)
        return value

    def _refuse(self, what: str, got: Any) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: the server {self.endpoint} answers with {str(got)[:100]!r} for {what}, which "
            "a hub does not. Correct HF_ENDPOINT, or give a folder with the repository's files."
        )

    def _explain(self, error: Exception, name: str) -> CheckpointError:
        """Condense an error of the client about a file to one line."""
        for kind, text in _EXPLANATIONS:
            if isinstance(error, kind):
                return CheckpointError(f"{self.source}: {text.format(revision=self.revision)}")
        if isinstance(error, errors.LocalEntryNotFoundError):
            return CheckpointError(
                f"{self.source}: cannot be reached, and {name} is not in the cache ({constants.HF_HUB_CACHE}). Go "
                "online, unset HF_HUB_OFFLINE, raise HF_HUB_ETAG_TIMEOUT on a slow network, or give a folder with its "
                "files."
            )
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        return CheckpointError(
            f"{self.source}: {name} cannot be downloaded or stored ({reason.splitlines()[0]}). Free space or fix "
            f"permissions in {constants.HF_HUB_CACHE}, set HF_HOME to another folder, or try again."
        )


def _answer(ask: Callable[[], Any]) -> Any:
    """Return what the hub answers; raise a TimeoutError if it has not done so within `_ANSWER_SECONDS`."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # raised where the answer is awaited
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(_ANSWER_SECONDS)
