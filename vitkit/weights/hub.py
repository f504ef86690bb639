"""Repositories of the Hugging Face hub, stored as folders in its own cache; interrupted downloads are continued."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from vitkit.errors import CheckpointError
from vitkit.weights.folders import CONFIG, INDEX_SUFFIX, WEIGHTS, files_in_index, read_object
from vitkit.weights.marian import FILES as TOKEN_FILES
from vitkit.weights.marian import TARGET_NUMBERS
from vitkit.weights.tokenizer_files import KINDS as TOKENIZER_KINDS
from vitkit.weights.tokenizer_files import TOKENIZER

logger = logging.getLogger("vitkit")

PREFIX = "hf:"
PREPROCESSOR, GENERATION = "preprocessor_config.json", "generation_config.json"
_ENDPOINT: str | None = None
"""URL of the hub; None: the client's default, which HF_ENDPOINT overrides."""


def is_hub_name(source: Any) -> bool:
    """Whether a model's name refers to a repository, as "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION"."""
    return isinstance(source, str) and source.startswith(PREFIX)


def hub_folder(source: str, check: Callable[[Path], Any] = lambda config: None) -> Path:
    """Return the local copy of a repository with a model of the transformers library, downloading it the first time.

    Args:
        source: see `is_hub_name`.
        check: called with the path of `config.json` before any weights are downloaded.
    Raises:
        CheckpointError: there is no such repository, it contains no model, or it cannot be reached or written.
    """
    repository, _, revision = source.removeprefix(PREFIX).partition("@")
    download = _Download(source, repository, revision or None)
    config = download(CONFIG, required=True)
    if config is None:
        raise CheckpointError(f"{source}: has no {CONFIG}, so it is not a model of the transformers library.")
    check(config)
    for name in WEIGHTS:
        path = download(name)
        if path is None:
            continue
        if name.endswith(INDEX_SUFFIX):
            for shard in files_in_index(path):
                if download(shard, required=True) is None:
                    raise CheckpointError(f"{source}: {name} names {shard}, which the repository lacks.")
        break
    else:
        if download.not_cached:
            raise download.unreachable(WEIGHTS[0])
        raise CheckpointError(f"{source}: has no weights: expected {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}.")
    others = {"marian": (GENERATION, *TOKEN_FILES, TARGET_NUMBERS)} | dict.fromkeys(TOKENIZER_KINDS, (TOKENIZER,))
    for name in others.get(read_object(config).get("model_type"), (PREPROCESSOR,)):
        download(name)
    return config.parent


class _Download:
    """Downloads files of one repository through the hub's client, with errors condensed to one line."""

    def __init__(self, source: str, repository: str, revision: str | None):
        self.source, self.repository, self.revision = source, repository, revision
        self.not_cached: list[str] = []
        """Files for which it is unknown, while offline, whether the repository has them."""
        self.is_reachable = True

    def __call__(self, name: str, *, required: bool = False) -> Path | None:
        """Return the local copy of a file, or None if the repository has no file of this name.

        When offline, the result is also None, with a warning, for files that are not `required` and not in the cache.
        """
        try:
            self.is_reachable = self.is_reachable and self._hub_responds(name)
            path = huggingface_hub.hf_hub_download(
                self.repository,
                name,
                revision=self.revision,
                endpoint=_ENDPOINT,
                local_files_only=not self.is_reachable,
            )
        except errors.HFValidationError as error:
            raise CheckpointError(f"{self.source}: not the name of a repository; expected hf:OWNER/NAME.") from error
        except errors.GatedRepoError as error:
            raise CheckpointError(
                f"{self.source}: access to it is gated. Accept its terms on its page, and log in: hf auth login."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{self.source}: there is no such repository, or it is private. Check owner and name; if it is "
                "private, log in: hf auth login."
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointError(f"{self.source}: the repository has no revision {self.revision!r}.") from error
        except errors.LocalEntryNotFoundError as error:
            if self._is_known_to_lack(name):
                return None
            if required or not huggingface_hub.constants.HF_HUB_OFFLINE:
                raise self.unreachable(name) from error
            self.not_cached.append(name)
            logger.warning(f"{self.source}: offline, and {name} is not in the cache: continuing without it.")
            return None
        except errors.EntryNotFoundError:
            return None
        # The errors of the client's HTTP library are base classes of the client's own; most are not OSErrors.
        except (OSError, ValueError, *errors.HfHubHTTPError.__bases__) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise CheckpointError(
                f"{self.source}: {name} cannot be downloaded or stored ({reason.splitlines()[0]}). Free space or fix "
                f"permissions in {huggingface_hub.constants.HF_HUB_CACHE}, set HF_HOME to another folder, or try again."
            ) from error
        return Path(path)

    def _hub_responds(self, name: str) -> bool:
        """Whether the hub responds to one request for a file's metadata, within twice HF_HUB_ETAG_TIMEOUT (10 s).

        The client itself retries six times for up to a minute each, and each of a host's addresses has that timeout.
        """
        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.revision, endpoint=_ENDPOINT)
        seconds = huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
        responses = []

        def request() -> None:
            try:
                huggingface_hub.get_hf_file_metadata(url, timeout=seconds)
            except errors.HfHubHTTPError:
                pass  # an answer, which hf_hub_download explains
            except (OSError, *errors.HfHubHTTPError.__bases__):
                return
            responses.append(name)

        # A daemon, because looking up an address cannot be interrupted and must not delay the end of the program.
        thread = threading.Thread(target=request, daemon=True)
        thread.start()
        thread.join(2 * seconds)
        return bool(responses)

    def _is_known_to_lack(self, name: str) -> bool:
        """Whether the cache records an earlier answer of the hub that the repository has no such file."""
        cache = huggingface_hub.constants.HF_HUB_CACHE
        path = huggingface_hub.try_to_load_from_cache(self.repository, name, cache_dir=cache, revision=self.revision)
        return path is huggingface_hub._CACHED_NO_EXIST

    def unreachable(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: cannot be reached, and {name} is not in the cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}). Go online, unset HF_HUB_OFFLINE, raise HF_HUB_ETAG_TIMEOUT "
            "on a slow network, or give a folder with its files."
        )
