"""Repositories of the Hugging Face hub, as folders in its own cache; what has broken off goes on where it stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitkit.checkpoint.folders import CONFIG, INDEX_SUFFIX, WEIGHTS, read_object
from vitkit.errors import CheckpointError

PREFIX = "hf:"
PREPROCESSOR = "preprocessor_config.json"
_ENDPOINT: str | None = None
"""Address of the hub; None: the client's own, which HF_ENDPOINT sets."""


def is_hub_name(source: Any) -> bool:
    """Whether a model's name is a repository's, "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION"."""
    return isinstance(source, str) and source.startswith(PREFIX)


def hub_folder(source: str, check: Callable[[Path], Any] = lambda config: None) -> Path:
    """Return the local copy of a repository with a model of the transformers library; downloaded once.

    Args:
        source: see `is_hub_name`.
        check: called with the path of `config.json` before any weights are downloaded.
    Raises:
        CheckpointError: there is no such repository, it holds no model, or it cannot be reached or written.
    """
    repository, _, revision = source.removeprefix(PREFIX).partition("@")
    download = _Download(source, repository, revision or None)
    config = download(CONFIG)
    if config is None:
        raise CheckpointError(f"{source}: has no {CONFIG}, so it is no model of the transformers library.")
    check(config)
    for name in WEIGHTS:
        path = download(name)
        if path is None:
            continue
        if name.endswith(INDEX_SUFFIX):
            for shard in sorted({str(file) for file in read_object(path).get("weight_map", {}).values()}):
                if download(shard) is None:
                    raise CheckpointError(f"{source}: {name} names {shard}, which the repository lacks.")
        break
    else:
        raise CheckpointError(f"{source}: holds no weights: expected {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}.")
    download(PREPROCESSOR)
    return config.parent


class _Download:
    """Fetches files of one repository through the hub's client, with its errors in one line."""

    def __init__(self, source: str, repository: str, revision: str | None):
        try:
            import huggingface_hub
        except ImportError as error:
            raise CheckpointError(f"{source}: needs the hub's client: pip install 'vitkit[hub]'.") from error
        self.hub, self.source, self.repository, self.revision = huggingface_hub, source, repository, revision

    def __call__(self, name: str) -> Path | None:
        """Return the local copy of a file; None if the repository has none of this name."""
        errors = self.hub.errors
        try:
            path = self.hub.hf_hub_download(self.repository, name, revision=self.revision, endpoint=_ENDPOINT)
        except errors.HFValidationError as error:
            raise CheckpointError(f"{self.source}: not the name of a repository; expected hf:OWNER/NAME.") from error
        except errors.GatedRepoError as error:
            raise CheckpointError(
                f"{self.source}: its owner asks for consent. Give it on its page, and log in: hf auth login."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{self.source}: no such repository, or a private one. Check owner and name; for a private one log in: "
                "hf auth login."
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointError(f"{self.source}: the repository has no revision {self.revision!r}.") from error
        except errors.LocalEntryNotFoundError as error:
            if name != CONFIG:
                # Offline it is not known whether the repository has it; what is in the cache will do.
                return None
            raise CheckpointError(
                f"{self.source}: cannot be reached, and is not in the cache ({self.hub.constants.HF_HUB_CACHE}). Go "
                "online, unset HF_HUB_OFFLINE, or give a folder with its files."
            ) from error
        except errors.EntryNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"{self.source}: {name} cannot be stored or fetched ({error.strerror or error}). Make room or set the "
                f"rights in {self.hub.constants.HF_HUB_CACHE}, set HF_HOME to another folder, or try again."
            ) from error
        return Path(path)
