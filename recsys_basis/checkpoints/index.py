"""DCP's index of a checkpoint, a pickle, read so that it can name nothing but what an index is made of."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from recsys_basis.checkpoints.folder import CheckpointError


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled index may name only the classes an index is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint index: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} does not hold a checkpoint index")
        if not all(
            isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise CheckpointError(f"{path} lists entries that are not tensors")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Size, dtype and chunks of each tensor, by its name."""
        entries = self.read_metadata().state_dict_metadata
        return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED: ClassVar = {
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "_MEM_FORMAT_ENCODING",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            )
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint index needs")


def bytes_of(entry: TensorStorageMetadata) -> int:
    """Bytes of a whole tensor."""
    return entry.size.numel() * entry.properties.dtype.itemsize


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of checkpoint ``path``, whole, by its name; needs no process group."""
    reader = SafeReader(path)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in reader.tensors().items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state
