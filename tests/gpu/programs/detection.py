"""A detector is trained on images of changing size: a pyramid of features, many proposals, some of them refined."""

import itertools
import random

import common
import torch
from torch.nn import functional


def convolution(inputs, outputs, stride=1):
    return torch.nn.Sequential(
        torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()
    )


def doubled(x, like):
    """Twice as large, cut to the size of another: by copies, whose gradients are sums in a fixed order."""
    rows, channels, height, width = x.shape
    x = x[..., :, None, :, None].expand(rows, channels, height, 2, width, 2)
    return x.reshape(rows, channels, 2 * height, 2 * width)[..., : like.shape[2], : like.shape[3]]


def overlaps(boxes):
    """The share that each two boxes have in common."""
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common_area = (high - low).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1)
    return common_area / (areas[:, None] + areas[None] - common_area).clamp(min=1e-6)


class Model(torch.nn.Module):
    def __init__(self, width, levels):
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = convolution(3, width, 2)
        pairs = itertools.pairwise([width, *widths])
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(convolution(a, b, 2), convolution(b, b)) for a, b in pairs
        )
        self.sides = torch.nn.ModuleList(torch.nn.Conv2d(one, 2 * width, 1) for one in widths)
        self.head = torch.nn.Conv2d(2 * width, 5, 3, padding=1)
        self.refine = torch.nn.Sequential(torch.nn.Linear(2 * width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def forward(self, images, most):
        x, features = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        top, losses = None, []
        for feature, side in zip(reversed(features), reversed(self.sides), strict=True):
            top = side(feature) if top is None else side(feature) + doubled(top, feature)
            found = self.head(top).flatten(2)
            losses.append(functional.binary_cross_entropy_with_logits(found[:, 0], torch.zeros_like(found[:, 0])))
            for row in range(len(images)):
                best = found[row, 0].topk(min(most, found.shape[2])).indices
                with torch.no_grad():
                    corners = found[row, 1:, best].T.float()
                    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:].abs()], dim=1)
                    kept = best[overlaps(boxes).triu(1).amax(0) < 0.5]  # as many as there happen to be
                losses.append(self.refine(top[row].flatten(1)[:, kept].T).square().mean())
        return torch.stack(losses).nan_to_num().sum()


def main():
    args = common.arguments(common.MODES_OF_TORCH, 80)
    memory = common.TorchMemory(args)
    common.deterministic(torch)
    width, levels, rows, least, largest = (4, 2, 1, 32, 65) if args.small else (64, 4, 4, 320, 1025)
    with memory:
        model = Model(width, levels).to(args.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        steps = memory.steps()
        sizes = random.Random(2)
        for _ in range(args.steps):
            height, breadth = (sizes.randrange(least, largest, 8) for _ in range(2))
            images = torch.randn(rows, 3, height, breadth)
            with steps.step():
                loss = model(images.to(args.device), 20 if args.small else 1000)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            steps.add(loss.detach().cpu().numpy().reshape(1))
        steps.show(args)


main()
