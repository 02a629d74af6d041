"""The package's modules."""

from commands import ROOT

MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted((ROOT / "kangaroo").rglob("*.py"))
}
NAMES = [name.removesuffix(".__init__") for name in MODULES]
