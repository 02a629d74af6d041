"""vLLM's CPU wheel with the Python files of another release: overlay.py VERSION FOLDER [PIP_ARGS]

This is for releases that have no CPU wheel. The compiled parts are those of the installed wheel,
and must have what the release calls. With FOLDER in PYTHONPATH and VLLM_TARGET_DEVICE=cpu, Python
then imports this vLLM.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

version, folder = sys.argv[1], Path(sys.argv[2])
installed = importlib.util.find_spec("vllm")
with tempfile.TemporaryDirectory() as temporary:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", temporary]
    subprocess.run([*pip, *sys.argv[3:], "--only-binary=:all:", f"vllm=={version}"], check=True)
    (wheel,) = Path(temporary).glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(
            folder, [x for x in files.namelist() if not x.endswith((".so", "vllm-rs"))]
        )
for compiled in Path(installed.origin).parent.glob("*.so"):
    shutil.copy(compiled, folder / "vllm")
