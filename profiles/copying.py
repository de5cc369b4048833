"""A shipped profile as a file of one's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import SparsekvError
from .json_schema import FILE_NAME
from .loader import SUFFIX, profile_text, shipped_names


def copy_profile(name: str, path: Path) -> Path:
    """Writes the shipped profile `name` to `path`, or into it where it is a folder; returns the file.

    Raises:
        SparsekvError: no such profile, or the file cannot be written, or is there already.
    """
    if name not in shipped_names():
        profile_text(name)  # says what is wrong with the name
        raise SparsekvError(f"{name} is not a shipped profile", hint="`sparsekv profiles list` shows those")
    target = path / f"{name}{SUFFIX}" if path.is_dir() else path
    schema = str(resources.files("sparsekv.profiles") / FILE_NAME)
    text = profile_text(name).replace(f"$schema={FILE_NAME}", f"$schema={schema}", 1)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SparsekvError(f"{target} is already there", hint="choose another path; nothing is overwritten") from None
    except OSError as error:
        raise SparsekvError(f"cannot write {target}: {error.strerror}") from None
    return target
