"""One owner of a run folder: a lock that the kernel releases when all its holders are gone."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longspan.errors import UserError

LOCK = "lock"
"""The file in a run folder that its owner has locked; it names the owner."""
INHERITED = "LONGSPAN_LOCK"
"""Set by the launcher in the environment of its processes: the descriptor of the lock, which they
hold too, so that no other run begins while one of them is left."""
WAIT_S = 5.0
"""How long to wait for a lock: a process that was just killed takes a moment to be gone."""
ELASTIC_WAIT_S = 120.0
"""The same under torchrun, which may move rank 0: the lock of a lost node lasts for its lease."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def owned(folder: Path) -> Iterator[int]:
    """Own a run folder in this context; yield the descriptor of its lock, for child processes.

    The folder is created, and removed at the end if nothing was written to it. Raises UserError if
    another process owns it.
    """
    if INHERITED in os.environ:
        descriptor = int(os.environ[INHERITED])
        os.set_inheritable(descriptor, False)
        yield descriptor
        return
    try:
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder / LOCK)
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        with suppress(OSError):  # the folder may be gone, or have files that stay
            if _is_still(folder / LOCK, descriptor):  # not that of a later owner
                (folder / LOCK).unlink()
            for path in created:
                path.rmdir()
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Lock a file, which is created if need be; return its descriptor."""
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
    deadline = time.monotonic() + (ELASTIC_WAIT_S if is_elastic else WAIT_S)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path.parent} is in use by {owner or 'another process'}: two runs in one "
                    "folder would remove each other's checkpoints; stop that one first, by "
                    f"Ctrl-C or touch {path.parent / 'STOP'}"
                ) from None
            time.sleep(0.1)
            continue
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
            print(
                f"longspan: cannot lock {path}: {error.strerror}; nothing keeps a second run from "
                "using the same folder",
                file=sys.stderr,
            )
        if _is_still(path, descriptor):  # its last owner may have removed it meanwhile
            break
        os.close(descriptor)
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
