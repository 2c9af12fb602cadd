"""The standard library's reader of TOML, or its model where Python is too old to have one."""

import sys

if sys.version_info >= (3, 11):
    import tomllib as tomllib
else:
    import tomli as tomllib

__all__ = ["tomllib"]
