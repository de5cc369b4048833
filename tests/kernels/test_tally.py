"""tally: sums over sparse requests only, padding ignored."""

from types import SimpleNamespace

import pytest
import torch

from sparsekv.kernels.policy import SelectionPolicy
from sparsekv.kernels.tally import kernel, tally_reference


@pytest.mark.parametrize(("requests", "heads"), [(0, 4), (1, 1), (7, 3), (8, 4), (131, 4)])
def test_tally(backend, device, requests, heads):
    torch.manual_seed(requests)
    policy = SelectionPolicy(dense_below=100)
    seq_lens = torch.randint(0, 300, (requests,), dtype=torch.int32)
    seq_lens[::3] = 0
    counts = torch.randint(0, 200, (requests, heads), dtype=torch.int32)
    mass = torch.rand(requests, heads)
    mass[seq_lens == 0] = torch.nan  # rows of graph padding hold anything
    totals = torch.arange(6, dtype=torch.float64)
    sparse = seq_lens > 100
    expected = totals + torch.tensor(
        [
            counts[sparse].sum(),
            seq_lens[sparse].sum() * heads,
            sparse.sum() * heads,
            mass[sparse].sum(),
            sparse.sum(),
            ((seq_lens > 0) & ~sparse).sum(),
        ]
    )
    counts, mass, seq_lens, totals = (t.to(device) for t in (counts, mass, seq_lens, totals))
    if backend == "reference":
        tally_reference(SimpleNamespace(counts=counts, mass=mass), seq_lens, policy, totals)
    else:
        kernel.tally(counts, mass, seq_lens, policy.dense_below, totals)
    torch.testing.assert_close(totals.cpu(), expected, rtol=1e-6, atol=1e-4)
