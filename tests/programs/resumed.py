"""Continues the run whose checkpoint is in the file `path`, and writes a checkpoint after each batch."""

import hashlib
import json
import os
import sys
from typing import Any

import torch

from penstock import ParallelSampler, RandomAgent, SerialSampler

given = json.loads(sys.argv[1])
path, digests = given["path"], list[str]()


def digest(sampler: Any, infos: Any) -> str:
    words = hashlib.sha256(repr([vars(info) for info in infos]).encode())
    for _, leaf in sampler.samples_np.leaves():
        words.update(leaf.tobytes())
    return words.hexdigest()


cls: Any = {"serial": SerialSampler, "parallel": ParallelSampler}[given["kind"]]
with cls(given["env_id"], n_workers=given["n_workers"], **given["settings"]) as sampler:
    sampler.initialize(RandomAgent(), seed=7)
    if os.path.exists(path):
        checkpoint = torch.load(path)
        report = sampler.load_state_dict(checkpoint["sampler"])
        assert not report.reseeded, report
        digests = checkpoint["digests"]
    print("began", len(digests), flush=True)
    while len(digests) < given["n_batches"]:
        _, infos = sampler.obtain_samples(len(digests))
        digests.append(digest(sampler, infos))
        torch.save({"sampler": sampler.state_dict(env_state="require"), "digests": digests}, path + ".new")
        os.replace(path + ".new", path)
        print("batch", len(digests), flush=True)
