"""A custom training loop with DeepSpeed: deepspeed examples/custom_loop_deepspeed.py, or torchrun.

Without a GPU set DS_ACCELERATOR=cpu. DeepSpeed then compiles an op once, which takes a minute.
"""

from pathlib import Path

import deepspeed
import torch

from longspan import create_model

model = create_model("data.context=256", "model.hidden=64")
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
text = torch.tensor(list(Path(__file__).read_bytes()))
for _ in range(20):
    tokens, targets = text[:256].unsqueeze(0), text[1:257].unsqueeze(0)
    loss = engine(tokens.to(engine.device), targets.to(engine.device)) / targets.numel()
    engine.backward(loss)
    engine.step()
print(f"rank {torch.distributed.get_rank()}: loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
