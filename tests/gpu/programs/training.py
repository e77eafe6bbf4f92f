"""A transformer is trained: autocast, checkpoints of activations, sequences of changing length."""

import random

import common
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = torch.nn.LayerNorm(width)
        self.project = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.project(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(x)


class Model(torch.nn.Module):
    def __init__(self, words, width, layers, heads, longest):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Parameter(torch.randn(longest, width) * 0.02)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    args = common.arguments(common.MODES_OF_TORCH, 60)
    memory = common.TorchMemory(args)
    common.deterministic(torch)
    words, width, layers, heads, rows, longest = (
        (100, 32, 2, 2, 2, 64) if args.small else (32000, 1024, 12, 16, 8, 1024)
    )
    with memory, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = Model(words, width, layers, heads, longest).to(args.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        steps = memory.steps()
        lengths = random.Random(0)

        def train():
            length = lengths.randrange(longest // 4, longest + 1, 16)
            tokens = torch.randint(words, (rows, length + 1)).to(args.device)
            with torch.autocast(args.device, dtype=torch.bfloat16):
                found = model(tokens[:, :-1])
                loss = functional.cross_entropy(found.reshape(-1, words).float(), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        for _ in range(args.steps):
            with steps.step():
                loss = train()
            steps.add(loss.detach().cpu().numpy().reshape(1))
        steps.add(model.head.weight.detach().cpu().numpy())
        more = common.driver_share(torch, train) if args.profile else {}
        steps.show(args, **more)


main()
