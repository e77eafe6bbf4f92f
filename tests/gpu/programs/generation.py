"""Text is generated with a cache of keys and values that grows by a token a step, for requests of several lengths."""

import random

import common
import torch
from torch.nn import functional


class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.feed = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x, cache):
        rows, length, width = x.shape
        query, key, value = self.project(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = functional.layer_norm(x + self.out(mixed.transpose(1, 2).reshape(rows, length, width)), (width,))
        return functional.layer_norm(x + self.feed(x), (width,)), (key, value)


def main():
    args = common.arguments(common.MODES_OF_TORCH, 8)
    memory = common.TorchMemory(args)
    common.deterministic(torch)
    words, width, layers, heads, most, new = (100, 32, 2, 2, 20, 5) if args.small else (32000, 2048, 16, 16, 1500, 120)
    kind = torch.float32 if args.device == "cpu" else torch.bfloat16
    with memory, torch.inference_mode(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        embed = (torch.randn(words, width) * 0.05).to(args.device, kind)
        stack = [Layer(width, heads).to(args.device, kind) for _ in range(layers)]
        steps = memory.steps()
        sizes = random.Random(1)
        for _ in range(args.steps):
            rows, length = sizes.choice([1, 2, 4, 8]), sizes.randrange(most // 10, most)
            tokens = torch.randint(words, (rows, length)).to(args.device)
            caches = [None] * layers
            made = []
            for _ in range(new):
                with steps.step():
                    x = embed[tokens]
                    for number, layer in enumerate(stack):
                        x, caches[number] = layer(x, caches[number])
                    tokens = (x[:, -1:] @ embed.T).argmax(-1)
                made.append(tokens)
            steps.add(torch.cat(made, dim=1).cpu().numpy())
        steps.show(args)


main()
