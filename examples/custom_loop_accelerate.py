"""A custom training loop with Accelerate.

torchrun --standalone --nproc-per-node 2 examples/custom_loop_accelerate.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator

from longspan import create_model

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = create_model("data.context=256", "model.hidden=64")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
text = torch.tensor(list(Path(__file__).read_bytes()))
for _ in range(20):
    tokens, targets = text[:256].unsqueeze(0), text[1:257].unsqueeze(0)
    loss = model(tokens.to(accelerator.device), targets.to(accelerator.device)) / targets.numel()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {accelerator.process_index}: loss {loss.item():.4f}")
model, optimizer = accelerator.free_memory(model, optimizer)  # before the process group ends
accelerator.end_training()
