"""Runs the Python examples of README.md with the penstock that is installed: python try_readme.py README.md"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

examples = re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.DOTALL)
assert examples, f"{sys.argv[1]} has no example"
for example in examples:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "example.py")
        script.write_text(example, encoding="utf-8")
        subprocess.run([sys.executable, script], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=600)
print(f"the {len(examples)} examples of README.md run")
