"""Reads run files: TOML or YAML, dotted overrides, and all problems reported at once."""

from longspan.runfile.folder import (
    RUN_FILE,
    check_run_folder,
    is_draft,
    new_run_dir,
    saved_run_file,
)
from longspan.runfile.parsing import ONE_PROCESS, dump_run, load_run, parse_run

__all__ = [
    "ONE_PROCESS",
    "RUN_FILE",
    "check_run_folder",
    "dump_run",
    "is_draft",
    "load_run",
    "new_run_dir",
    "parse_run",
    "saved_run_file",
]
