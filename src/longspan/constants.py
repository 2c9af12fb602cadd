"""Constants that several packages share."""

IGNORE_INDEX = -100
"""The target of a position without loss, as in `torch.nn.functional.cross_entropy`."""
LOSS_CHUNK = 1 << 26
"""Logits per chunk of the loss: 256 MiB in float32, enough rows for the matrix products to run at
full rate."""
KERNEL_LOSS_CHUNK = 1 << 28
"""The same where the softmax is a kernel, which needs no float32 copies: 512 MiB in bf16."""

OFFLOAD_HELD, OFFLOAD_IN_FLIGHT = 2, 2
"""Of offloaded activations, the newest that are not copied yet, and those whose copy to the CPU may
still be under way while compute goes on: so many are on the device."""
MUON_ITERATIONS = 5
"""Newton-Schulz iterations of a step of Muon."""
CUDNN_PAIRS = 1 << 24
"""Pairs of a query and a key, per head, from which on cuDNN computes dense attention on Hopper."""
