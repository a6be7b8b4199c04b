"""Scoring, the only place that loads weights, resets BatchNorm and evaluates images; comparing scores; the teacher."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from hf_retarget.data import Batch, BatchCache, ImageData, Split, derive_seed
from hf_retarget.document import Lead
from hf_retarget.errors import DataError, ModelError, NotFiniteError
from hf_retarget.evaluation.batchnorm import BatchNormReset, reset_batchnorm
from hf_retarget.matching.gradients import TEMPERATURE, evaluation_mode
from hf_retarget.progress import SILENT, Progress
from hf_retarget.recipe import PortOptions
from hf_retarget.run import Run, return_memory

MOST_CONFUSED = 1024
"""Maximum number of classes for a confusion matrix, whose size is the square."""
ROWS = 1024
"""Outputs are looked at so many rows at a time, as that takes several copies of them."""
_LARGE = 1 << 29  # bytes of a model from which returning memory matters more than the time it takes

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Score:
    """The result of an evaluation. Accuracies are between 0 and 1."""

    loss: float
    top1: float
    top5: float | None
    """None for five classes or fewer."""
    count: int
    per_class: tuple[float | None, ...]
    """The accuracy on each class, None for classes without images."""
    confusion: tuple[tuple[int, ...], ...]
    """One row per true class: how often each class was predicted. Empty above `MOST_CONFUSED` classes."""
    predictions: tuple[int, ...]
    """The predicted class of each image, in the order of the batches."""
    labels: tuple[int, ...] = ()
    """The true class of each image, in the same order."""

    @property
    def right(self) -> tuple[bool, ...]:
        """Whether each image was classified correctly."""
        return tuple(said == label for said, label in zip(self.predictions, self.labels, strict=True))


class Scorer:
    """Scores weights by loading them into one model, in turn."""

    def __init__(self, model: nn.Module, data: ImageData, classes: int, options: PortOptions, run: Run) -> None:
        self.model, self.data, self.classes, self.options, self.run = model, data, classes, options, run
        self.images = 0
        """Images of all forward passes so far."""
        size = data.train.preprocess.input_size
        self._batches = BatchCache(size)
        self._channels_last = run.accelerator.device.type == "cpu" and _takes_channels_last(model, size)

    def load(self, weights: Tensors, parameters: Tensors | None = None) -> None:
        """Load a state dict and then, if given, other parameters."""
        self.model.load_state_dict(dict(weights))
        if parameters is not None:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():  # each tied one once
                    parameter.copy_(parameters[name])

    def weights(self, known: Tensors | None = None) -> dict[str, Tensor]:
        """A copy of the model's weights; those in `known`, which were loaded, are not copied again."""
        state, known = self.model.state_dict(), known or {}
        return {name: known[name] if name in known else state[name].detach().cpu().clone() for name in state}

    @contextmanager
    def without_weights(self) -> Iterator[None]:
        """Release the memory of the model's parameters for a while; afterwards, weights must be loaded."""
        shapes = {parameter: parameter.shape for parameter in self.model.parameters()}
        size = sum(parameter.nbytes for parameter in shapes)
        for parameter in shapes:
            parameter.data = parameter.data.new_empty(0)
        if size >= _LARGE:
            return_memory()
        try:
            yield
        finally:
            if size >= _LARGE:
                return_memory()
            for parameter, shape in shapes.items():
                parameter.data = parameter.data.new_zeros(shape)

    def reset_batchnorm(self) -> BatchNormReset:
        """Estimate the BatchNorm statistics for the model's weights, always from the same images."""
        options, run = self.options, self.run
        if not options.bn_batches:
            return BatchNormReset({}, {}, 0)

        def draw() -> Iterable[Batch]:
            other = derive_seed(options.seed, "batchnorm")  # other images than those of the gradients
            batches = self.data.train.batches
            return self._move(batches(options.batch_size, seed=other, count=options.bn_batches, workers=run.workers))

        with run.clock.stage("batchnorm"), self._laid_out():
            batches = self._batches.get("batchnorm", options.bn_batches * options.batch_size, draw)
            done = reset_batchnorm(self.model, batches, accelerator=run.accelerator, progress=run.progress)
        self.images += done.batches * options.batch_size
        return done

    def score(self, split: Split) -> Score:
        """Score the model's weights on a split."""
        run, self.images = self.run, self.images + len(split)
        with run.clock.stage("evaluation"), self._laid_out():
            return score_model(
                self.model,
                self._draw(split),
                self.classes,
                accelerator=run.accelerator,
                progress=run.progress,
                total=-(-len(split) // self.options.eval_batch),
            )

    def answer(self, split: Split, layer: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """The model's outputs for every image of a split, and the inputs of one of its layers.

        Without a layer, the latter are empty; unreadable images have zeros. Every process runs all images, so that all
        agree exactly.
        """
        run, device, inner, found = self.run, self.run.accelerator.device, list[Tensor](), list[tuple[Tensor, Tensor]]()
        hook = layer.register_forward_pre_hook(lambda _, inputs: inner.append(inputs[0])) if layer else None
        self.model.to(device)
        self.images += len(split)
        try:
            with run.clock.stage("evaluation"), torch.no_grad(), evaluation_mode(self.model), self._laid_out():
                total = -(-len(split) // self.options.eval_batch)
                for inputs, _ in run.progress.track(self._draw(split), "evaluating", total):
                    inner.clear()
                    with run.accelerator.autocast():
                        output = self.model(inputs.to(device))
                    taken = inner[-1].flatten(1) if inner else output[:, :0]
                    found.append((output.float().cpu(), taken.float().cpu()))
        finally:
            if hook:
                hook.remove()
        both = []
        for each in zip(*found, strict=True):
            whole = torch.zeros(len(split), each[0].shape[1])
            whole[split.readable] = torch.cat(each)
            both.append(whole)
        return both[0], both[1]

    @contextmanager
    def _laid_out(self) -> Iterator[None]:
        """The weights of convolutions with their channels last, where the model can be computed so."""
        set_layout(self.model, torch.channels_last if self._channels_last else torch.contiguous_format)
        try:
            yield
        finally:
            set_layout(self.model, torch.contiguous_format)

    def _draw(self, split: Split) -> Iterable[Batch]:
        size, run = self.options.eval_batch, self.run
        # Different images may have the same name, and the same images different labels.
        key = f"{split.name}/{id(split.rows)}/{hash(split.targets.numpy().tobytes())}"
        return self._batches.get(key, len(split), lambda: self._move(split.batches(size, workers=run.workers)))

    def _move(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move images to the device, where cached ones stay."""
        return ((inputs.to(self.run.accelerator.device), labels) for inputs, labels in batches)


def set_layout(model: nn.Module, layout: torch.memory_format) -> None:
    """Lay out the weights of convolutions; activations follow. Channels last is up to twice as fast on a processor."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


def _takes_channels_last(model: nn.Module, size: tuple[int, ...]) -> bool:
    """Whether the model can be computed with channels last; some modules view their inputs in another shape."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    first = next(model.parameters())
    set_layout(model, torch.channels_last)
    try:
        with torch.no_grad(), evaluation_mode(model):
            model(torch.zeros(2, *size, device=first.device, dtype=first.dtype))
    except Exception:  # whatever it raises now, it raises later if it is about something else
        return False
    finally:
        set_layout(model, torch.contiguous_format)
    return True


def score_model(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: int,
    *,
    accelerator: Accelerator | None = None,
    progress: Progress = SILENT,
    total: int | None = None,
) -> Score:
    """Score a model on labelled batches.

    With n processes each runs every n-th batch; all get the same score as a single process. Ties between classes are
    resolved in favour of the first. Raises NotFiniteError if an output is NaN.

    Example:
        >>> score = score_model(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 1]))], classes=3)
        >>> round(score.top1, 2), score.confusion, score.per_class
        (0.67, ((1, 0, 0), (0, 1, 1), (0, 0, 0)), (1.0, 0.5, None))
    """
    device = accelerator.device if accelerator else torch.device("cpu")
    rank, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    model.to(device)
    labels: list[Tensor] = []
    ranked: list[Tensor] = []  # the best classes of each image, in order
    losses: list[float] = []
    with torch.no_grad(), evaluation_mode(model):
        for number, (inputs, answers) in enumerate(progress.track(batches, "evaluating", total)):
            _check_labels(answers, classes, number)
            labels.append(answers.cpu())
            ranked.append(torch.zeros(len(answers), min(classes, 5), dtype=torch.int64))
            losses.append(0.0)
            if number % processes == rank and len(answers):
                with accelerator.autocast() if accelerator else nullcontext():
                    output = model(inputs.to(device))
                    losses[-1] = float(cross_entropy(output, answers.to(device))) * len(answers)
                ranked[-1] = _best(output, classes)
                losses[-1] = math.nan if output.isnan().any() else losses[-1]
    if not labels:
        raise DataError("there are no images to evaluate on; is the split empty?")
    # Batches of other processes are zero here; as x + 0 is exactly x, the sums do not depend on the distribution.
    both = [torch.cat(ranked), torch.tensor(losses, dtype=torch.float64)]
    if accelerator is not None and processes > 1:
        both = [accelerator.reduce(each.to(device), "sum").cpu() for each in both]
    if (broken := both[1].isnan()).any():  # in all processes alike
        batch = int(broken.nonzero()[0, 0])
        raise NotFiniteError(f"the model's outputs for batch {batch + 1} are NaN: its weights are broken")
    return _score(torch.cat(labels), both[0], both[1].tolist(), classes)


def _score(labels: Tensor, ranked: Tensor, losses: list[float], classes: int) -> Score:
    predicted, table = ranked[:, 0], list[list[int]]()
    sizes = torch.bincount(labels, minlength=classes).tolist()
    hits = torch.bincount(labels[labels == predicted], minlength=classes).tolist()
    if classes <= MOST_CONFUSED:
        table = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes).tolist()
    return Score(
        loss=math.fsum(losses) / len(labels),
        top1=sum(hits) / len(labels),
        top5=int((ranked == labels[:, None]).sum()) / len(labels) if classes > 5 else None,
        count=len(labels),
        per_class=tuple(hit / size if size else None for hit, size in zip(hits, sizes, strict=True)),
        confusion=tuple(map(tuple, table)),
        predictions=tuple(predicted.tolist()),
        labels=tuple(labels.tolist()),
    )


def score_outputs(outputs: Tensor, labels: Tensor) -> Score:
    """The score of given outputs.

    Example:
        >>> score_outputs(torch.eye(3), torch.tensor([0, 1, 1])).right
        (True, True, False)
    """
    ranked = torch.cat([_best(each, outputs.shape[1]) for each in outputs.split(ROWS)])
    return _score(labels, ranked, sum_by_rows(outputs, labels), outputs.shape[1])


def sum_by_rows(outputs: Tensor, labels: Tensor, scale: float = 1.0) -> list[float]:
    """The cross-entropy of scaled outputs, one sum for each `ROWS` rows."""
    parts = zip(outputs.split(ROWS), labels.split(ROWS), strict=True)
    return [float(cross_entropy(scale * rows, own, reduction="sum")) for rows, own in parts]


def _best(output: Tensor, classes: int) -> Tensor:
    if output.ndim != 2 or output.shape[1] != classes:
        raise ModelError(
            f"the model's output has shape {list(output.shape)}, but there are {classes} classes; "
            "the model needs a head with one output per class"
        )
    # With a zero head all classes tie, and the result of argmax and topk is undefined; a stable sort is not.
    return output.float().argsort(dim=1, descending=True, stable=True)[:, :5].cpu()


def _check_labels(labels: Tensor, classes: int, number: int) -> None:
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(
            f"label {wrong} in batch {number} is not one of the model's {classes} classes (0 to {classes - 1})"
        )


# ---- two models on the same images


def measure_lead(ours: Score, theirs: Score) -> Lead:
    """The difference of two accuracies on the same images, with its standard error."""
    return Lead(ours.top1 - theirs.top1, paired_error(ours, theirs))


def paired_error(ours: Score, theirs: Score) -> float:
    """The standard error of the difference of two accuracies on the same images; only flips contribute.

    Example:
        >>> answers = ((0, 0, 0, 0), (0, 1, 1, 0))
        >>> ours, theirs = (Score(1.0, 0.5, None, 4, (), (), said, (0, 0, 1, 1)) for said in answers)
        >>> round(paired_error(ours, theirs), 3), paired_error(ours, ours)
        (0.354, 0.0)
    """
    only_ours, only_theirs = count_flips(ours, theirs)
    count = max(ours.count, 1)
    return math.sqrt(max(only_ours + only_theirs - (only_ours - only_theirs) ** 2 / count, 0)) / count


def count_flips(before: Score, after: Score) -> tuple[int, int]:
    """The numbers of images that only `before` has right (negative flips), and that only `after` has right."""
    pairs = list(zip(before.right, after.right, strict=True))
    return sum(one and not two for one, two in pairs), sum(two and not one for one, two in pairs)


# ---- the tuned model as a teacher


class Teacher:
    """The tuned model's predictions, computed once per image: augmented views share that of the original."""

    def __init__(self, scorer: Scorer, weights: Mapping[str, Tensor]) -> None:
        self.scorer, self.weights = scorer, weights
        self.images = 0
        """Images it was evaluated on."""
        self._kept: dict[str, Tensor] = {}

    def answer(self, split: Split) -> Tensor:
        """Its outputs for the images of a split."""
        key = f"{split.name}/{id(split.rows)}"  # different images may have the same name
        if key not in self._kept:
            before = self.scorer.weights()
            self.scorer.load(self.weights)
            self._kept[key] = self.scorer.answer(split)[0]
            self.scorer.load(before)
            self.images += len(split)
        return self._kept[key]

    def shares(self, split: Split, targets: str, temperature: float = 1.0) -> Tensor:
        """A probability row per image: the one-hot label, the teacher's probabilities, or the mean of both."""
        if targets == "labels":
            return one_hot(split.targets, self.scorer.classes).double()
        said = (self.answer(split).double() / temperature).softmax(1)
        return said if targets == "teacher" else (said + one_hot(split.targets, self.scorer.classes)) / 2

    def teach(self, split: Split, targets: str) -> Split:
        """The split with targets for the loss: labels, or probabilities at the loss's temperature."""
        if targets == "labels":
            return split
        return replace(split, targets=self.shares(split, targets, TEMPERATURE).float())

    def label(self, split: Split) -> Split:
        """The split with the teacher's predictions as labels: accuracy on it is agreement with the teacher."""
        return replace(split, targets=self.answer(split).argmax(1))


def answer_for_labels(data: ImageData, teacher: Teacher, *, test: bool) -> ImageData:
    """Replace labels by the teacher's predictions, in the test split only if `test`."""
    train, validation = teacher.label(data.train), teacher.label(data.validation)
    return replace(data, train=train, validation=validation, test=teacher.label(data.test) if test else data.test)
