"""Show that what orders memory is in the machine code of a wheel for aarch64:

    python .ci/orderings.py WHEEL

Prints for each compiled part how many of its instructions load with acquire (ldar), store with release (stlr) or are a
fence (dmb). Fails if the gates in `workers` do not load with acquire, or `buffers.ordering.full_fence` is no fence.
Needs pyelftools, which auditwheel brings.
"""

import io
import sys
import zipfile
from array import array

from elftools.elf.elffile import ELFFile

#: Mask and value of the instructions, from the Arm Architecture Reference Manual; the size of the operand is left out.
ORDERINGS = {"ldar": (0x3FFFFC00, 0x08DFFC00), "stlr": (0x3FFFFC00, 0x089FFC00), "dmb": (0xFFFFF0FF, 0xD50330BF)}
#: What these parts are for.
WANTED = {"penstock/workers/_native": ("ldar", "dmb"), "penstock/buffers/_native": ("dmb",)}

found = {}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.endswith(".so"):
            code = ELFFile(io.BytesIO(wheel.read(name))).get_section_by_name(".text").data()
            words = array("I", code[: len(code) // 4 * 4])
            found[name.split(".")[0]] = counts = {
                instruction: sum(word & mask == value for word in words)
                for instruction, (mask, value) in ORDERINGS.items()
            }
            print(f"{name}: " + ", ".join(f"{n} {instruction}" for instruction, n in counts.items()))
missing = [f"{name}: {want}" for name, wants in WANTED.items() for want in wants if not found[name][want]]
if missing:
    sys.exit(f"these instructions order memory on aarch64, and are missing: {missing}")
