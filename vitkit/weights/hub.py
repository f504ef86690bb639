"""Repositories of the Hugging Face hub, as folders in its client's cache; interrupted downloads are continued."""

import logging
from collections.abc import Callable
from os.path import isfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download

from vitkit.errors import CheckpointError
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
_CLIENT_ERRORS = (OSError, ValueError, *errors.HfHubHTTPError.__bases__)
"""What the client raises, with the base errors of its HTTP library, which the client's major versions change: requests,
httpx, httpx2. Most errors of the last two are not OSErrors."""


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
        self.is_reachable = not constants.HF_HUB_OFFLINE
        self.files: list[str] = []
        # Asked first: `snapshot_download` has no limit for how long the hub takes to answer.
        try:
            if self.is_reachable:
                seconds = constants.HF_HUB_ETAG_TIMEOUT
                info = HfApi(_ENDPOINT).model_info(self.name, revision=self.revision, timeout=seconds)
                self.files = [file.rfilename for file in info.siblings or ()]
        except tuple(kind for kind, _ in _EXPLANATIONS) as error:
            raise self._explain(error, CONFIG) from error
        except _CLIENT_ERRORS:  # including a hub that is out of order
            self.is_reachable = False

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
            folder = snapshot_download(
                self.name,
                revision=self.revision,
                cache_dir=constants.HF_HUB_CACHE,
                endpoint=_ENDPOINT,
                allow_patterns=list(names),
                local_files_only=not self.is_reachable,
            )
            missing = [name for name in names if not isfile(Path(folder, name))]
            if missing and required:
                raise errors.LocalEntryNotFoundError(missing[0])
        except _CLIENT_ERRORS as error:
            if isinstance(error, errors.LocalEntryNotFoundError) and not (required or self.is_reachable):
                logger.warning(
                    f"{self.source}: offline, and {' or '.join(names)} is not in the cache: continuing without it."
                )
                return None
            raise self._explain(error, names[0]) from error
        return Path(folder)

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
