"""A custom training loop with PyTorch's DDP.

torchrun --standalone --nproc-per-node 2 examples/custom_loop.py
"""

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from longspan import create_model

torch.distributed.init_process_group()
model = DistributedDataParallel(create_model("data.context=256", "model.hidden=64"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
text = torch.tensor(list(Path(__file__).read_bytes()))
for _ in range(20):
    tokens, targets = text[:256].unsqueeze(0), text[1:257].unsqueeze(0)
    loss = model(tokens, targets) / targets.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {torch.distributed.get_rank()}: loss {loss.item():.4f}")
del model  # before the process group, whose destruction would deadlock on the GIL
torch.distributed.destroy_process_group()
