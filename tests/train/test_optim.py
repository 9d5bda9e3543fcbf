"""Schedules against their closed forms, resuming to the bit, the average against its recursion."""

import io
import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dps_dist.config import Optim
from dps_dist.errors import InputError
from dps_dist.train.optim import Ema, clip, optimizer, schedule, set_momentum

OPTIMIZERS = {
    "adam": {"name": "adam", "betas": (0.8, 0.99)},
    "adamw": {"name": "adamw"},
    "sgd": {"name": "sgd"},
    "nesterov": {"name": "sgd", "nesterov": True},
    "sgd without momentum": {"name": "sgd", "momentum": 0.0},
}
SCHEDULES = ("onecycle", "cosine", "constant")


def network(seed=0, channels_last=False):
    torch.manual_seed(seed)
    # With a bias before batch norm Adam would step by its gradient's rounding error
    convolution = nn.Conv2d(3, 4, 3, bias=False)
    model = nn.Sequential(
        convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    return model.to(memory_format=torch.channels_last) if channels_last else model


def train(model, built, rates, steps, first=0):
    """`steps` steps on seeded noise: what they see depends on their number only."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (8,), generator=generator)
        F.cross_entropy(model(images), labels).backward()
        built.step()
        built.zero_grad()
        rates.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def rates_of(config, steps_per_epoch, epochs):
    """What the optimizer's two groups have at each step: learning rate, momentum or β1."""
    built = optimizer(config, network())
    rates = schedule(config, built, steps_per_epoch, epochs)
    seen = []
    for _ in range(steps_per_epoch * epochs):
        seen.append(
            [
                (g["lr"], g["momentum"] if "momentum" in g else g["betas"][0])
                for g in built.param_groups
            ]
        )
        built.step()
        rates.step()
    return seen


class TestSchedules:
    @pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
    @pytest.mark.parametrize(
        ("steps_per_epoch", "epochs"), [(1, 1), (2, 1), (3, 1), (1, 4), (7, 9)]
    )
    def test_onecycle(self, name, steps_per_epoch, epochs):
        config = Optim(name=name, lr=0.3, decay_norms_and_biases=False)
        total = steps_per_epoch * epochs
        peak = 0.3 * total - 1

        def at(step, start, top, end):
            if step <= peak:
                return top + (start - top) * (1 + math.cos(math.pi * step / peak)) / 2
            fallen = (step - peak) / (total - 1 - peak)
            return end + (top - end) * (1 + math.cos(math.pi * fallen)) / 2

        seen = rates_of(config, steps_per_epoch, epochs)
        for step, groups in enumerate(seen):
            expected = at(step, 0.3 / 25, 0.3, 0.3 / 25e4), at(step, 0.95, 0.85, 0.95)
            assert groups == [pytest.approx(expected, rel=1e-12)] * 2
        assert len(seen) == total

    @pytest.mark.parametrize(
        ("warmup_epochs", "warmup"), [(0.0, 0), (1.0, 10), (0.26, 3), (2.5, 25), (2.99, 30)]
    )
    @pytest.mark.parametrize("name", ["cosine", "constant"])
    def test_warmup_then_cosine_or_constant(self, name, warmup_epochs, warmup):
        config = Optim(name="sgd", lr=0.5, schedule=name, momentum=0.7, warmup_epochs=warmup_epochs)
        last = 29
        for step, [(lr, momentum)] in enumerate(rates_of(config, 10, 3)):
            expected = 0.5
            if step < warmup:
                expected = 0.5 * (step + 1) / (warmup + 1)
            elif name == "cosine":
                # cos² of half the angle, not the implementation's 1 + cos
                expected = 0.5 * math.cos(math.pi / 2 * (step - warmup) / (last - warmup)) ** 2
            assert lr == pytest.approx(expected, rel=1e-12, abs=1e-15)
            assert momentum == 0.7

    def test_cosine_is_lr_at_first_and_zero_at_last(self):
        rates = [lr for [(lr, _)] in rates_of(Optim(lr=0.25, schedule="cosine"), 5, 8)]
        assert rates[0] == 0.25
        assert rates[-1] == 0.0
        assert all(later < earlier for earlier, later in pairwise(rates))

    def test_cosine_stays_at_zero_after_the_end(self):
        built = optimizer(Optim(), network())
        rates = schedule(Optim(schedule="cosine"), built, 2, 2)
        for _ in range(6):
            built.step()
            rates.step()
        assert built.param_groups[0]["lr"] == 0.0

    @pytest.mark.parametrize("name", ["cosine", "constant"])
    def test_a_single_step_is_taken_at_lr(self, name):
        assert rates_of(Optim(lr=0.5, schedule=name), 1, 1) == [[(0.5, 0.9)]]

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize("warmup_epochs", [3.0, 3.5])
    def test_refuses_warmup_to_the_end(self, name, warmup_epochs):
        config = Optim(schedule=name, warmup_epochs=warmup_epochs)
        with pytest.raises(InputError, match=f"^optim.warmup_epochs is {warmup_epochs:g}: give "):
            schedule(config, optimizer(config, network()), 10, 3)


class TestOptimizer:
    @pytest.mark.parametrize("choice", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_takes_the_configured_values(self, choice):
        config = Optim(lr=0.125, weight_decay=0.25, **choice)
        built = optimizer(config, network())
        (group,) = built.param_groups
        assert type(built).__name__.lower() == config.name
        assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)
        if config.name == "sgd":
            assert (group["momentum"], group["nesterov"]) == (config.momentum, config.nesterov)
        else:
            assert group["betas"] == config.betas

    @pytest.mark.parametrize("choice", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_steps_like_torchs_loop(self, choice):
        config = Optim(lr=0.01, weight_decay=0.1, schedule="constant", **choice)
        model, reference = network(), network()
        built = optimizer(config, model)
        train(model, built, schedule(config, built, 4, 2), 8)
        options = {"lr": 0.01, "weight_decay": 0.1, "foreach": False, "fused": False}
        if config.name == "sgd":
            plain = torch.optim.SGD(
                reference.parameters(),
                momentum=config.momentum,
                nesterov=config.nesterov,
                **options,
            )
        else:
            kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
            plain = kind(reference.parameters(), betas=config.betas, **options)
        train(reference, plain, schedule(config, plain, 4, 2), 8)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
    def test_norms_and_biases_are_not_decayed(self, name):
        config = Optim(
            name=name, lr=0.1, weight_decay=0.5, momentum=0, decay_norms_and_biases=False
        )
        model = network()
        before = deepcopy(model.state_dict())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer(config, model).step()
        for key, p in model.named_parameters():
            decays = key in ("0.weight", "4.weight")
            assert torch.equal(p, before[key]) is not decays, key
            if decays and name != "adam":  # which makes a sign of any gradient
                torch.testing.assert_close(p, before[key] * (1 - 0.1 * 0.5))

    def test_all_are_decayed_by_default(self):
        model = network()
        (group,) = optimizer(Optim(weight_decay=0.5), model).param_groups
        assert len(group["params"]) == len(list(model.parameters()))

    def test_refuses_nesterov_without_momentum(self):
        with pytest.raises(InputError, match=r"^optim\.momentum is 0: .*optim\.nesterov"):
            optimizer(Optim(name="sgd", nesterov=True, momentum=0), network())

    @pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
    def test_a_skipped_first_step_leaves_no_trace(self, name):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = [network().to(device) for _ in range(2)]
        torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
        try:
            for model, slopes in zip(models, [(math.inf, 1.0, 2.0), (1.0, 2.0)], strict=True):
                built = optimizer(Optim(name=name), model)
                scaler = torch.amp.GradScaler(device, init_scale=2.0)
                for slope in slopes:
                    loss = torch.stack([(p * slope).sum() for p in model.parameters()]).sum()
                    scaler.scale(loss).backward()
                    scaler.unscale_(built)
                    scaler.step(built)
                    scaler.update()
                    built.zero_grad()
        finally:
            torch.use_deterministic_algorithms(False)
        for skipped, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(skipped, plain)


class TestResuming:
    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize("choice", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.parametrize("decay_norms_and_biases", [True, False])
    def test_continues_to_the_bit(self, name, choice, decay_norms_and_biases):
        config = Optim(
            lr=0.02,
            schedule=name,
            weight_decay=0.01,
            warmup_epochs=1.5,
            decay_norms_and_biases=decay_norms_and_biases,
            **choice,
        )

        def start(seed):
            model = network(seed)
            built = optimizer(config, model)
            return model, built, schedule(config, built, 4, 3)

        unbroken = start(0)
        train(*unbroken, 12)
        first = start(0)
        train(*first, 5)
        saved = through_a_file([part.state_dict() for part in first])
        second = start(1)
        for part, state in zip(second, saved, strict=True):
            part.load_state_dict(state)
        train(*second, 7, first=5)

        for key, value in unbroken[0].state_dict().items():
            assert torch.equal(second[0].state_dict()[key], value), key
        assert second[1].state_dict()["param_groups"] == unbroken[1].state_dict()["param_groups"]
        assert second[2].state_dict() == unbroken[2].state_dict()

    @pytest.mark.parametrize("choice", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.parametrize("before", [False, True])
    def test_in_another_memory_format(self, choice, before):
        config = Optim(schedule="constant", lr=0.02, **choice)

        def start(channels_last):
            model = network(0, channels_last)
            built = optimizer(config, model)
            return model, built, schedule(config, built, 4, 3)

        first = start(before)
        train(*first, 3)
        second = start(not before)
        for part, state in zip(second, first, strict=True):
            part.load_state_dict(through_a_file(state.state_dict()))
        train(*first, 1, first=3)
        train(*second, 1, first=3)
        assert first[0][0].weight.stride() != second[0][0].weight.stride()
        for ours, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class TestEma:
    @pytest.mark.parametrize("decay", [0.5, 0.95, 0.9999])
    def test_is_the_recursion(self, decay):
        model = network()
        ema = Ema(model, decay)
        average = {key: p.detach().double() for key, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(3)
        for n in range(60):
            for tensor in (*model.parameters(), model[1].running_mean):
                tensor.data.add_(torch.randn(tensor.shape, generator=generator))
            model[1].num_batches_tracked += 1
            ema.update(model)
            d = min(decay, (1 + n) / (10 + n))
            for key, p in model.named_parameters():
                average[key] = d * average[key] + (1 - d) * p.detach().double()
        for key, value in average.items():
            torch.testing.assert_close(ema.parameters[key].double(), value, rtol=1e-5, atol=1e-5)
        for key, buffer in model.named_buffers():
            assert torch.equal(ema.buffers[key], buffer)
        assert ema.updates == 60

    def moved(self):
        """A model, its average, and both of their tensors, all different."""
        model = network()
        ema = Ema(model, 0.9)
        for _ in range(3):
            model(torch.randn(8, 3, 8, 8))
            for p in model.parameters():
                p.data.add_(1.0)
            ema.update(model)
        model(torch.randn(8, 3, 8, 8))  # a buffer's own value is newer than its average's
        own = deepcopy(model.state_dict())
        averaged = deepcopy({**ema.parameters, **ema.buffers})
        assert not any(torch.equal(own[key], averaged[key]) for key in own)
        return model, ema, own, averaged

    def holds(self, model, expected):
        state = model.state_dict()
        assert state.keys() == expected.keys()
        return all(torch.equal(state[key], value) for key, value in expected.items())

    def test_is_applied_and_taken_back(self):
        model, ema, own, averaged = self.moved()
        addresses = [t.data_ptr() for t in model.state_dict().values()]
        with ema.applied(model):
            assert self.holds(model, averaged)
            assert torch.is_grad_enabled()
            model(torch.randn(8, 3, 8, 8))  # in training mode, which moves the buffers
        assert self.holds(model, own)
        assert [t.data_ptr() for t in model.state_dict().values()] == addresses
        assert all(
            torch.equal({**ema.parameters, **ema.buffers}[key], averaged[key]) for key in own
        )

    def test_is_taken_back_after_an_error(self):
        model, ema, own, averaged = self.moved()
        with pytest.raises(KeyError), ema.applied(model):
            assert self.holds(model, averaged)
            raise KeyError
        assert self.holds(model, own)

    def test_nothing_of_the_model_is_shared(self):
        model = network()
        ema = Ema(model, 0.9)
        before = deepcopy(ema.state_dict())
        for tensor in model.state_dict().values():
            tensor.add_(1)
        for section in ("parameters", "buffers"):
            for key, value in before[section].items():
                assert torch.equal(ema.state_dict()[section][key], value)

    def test_model_without_buffers(self):
        model = nn.Linear(2, 3)
        ema = Ema(model, 0.9)
        ema.update(model)
        with ema.applied(model):
            pass
        ema.load_state_dict(through_a_file(ema.state_dict()))

    def test_continues_to_the_bit(self):
        model, unbroken, _, _ = self.moved()
        resumed = Ema(network(seed=1), 0.9)
        resumed.load_state_dict(through_a_file(unbroken.state_dict()))
        for ema in (unbroken, resumed):
            ema.update(model)
        assert resumed.updates == unbroken.updates == 4
        for key, value in unbroken.parameters.items():
            assert torch.equal(resumed.parameters[key], value)
        for key, value in unbroken.buffers.items():
            assert torch.equal(resumed.buffers[key], value)


class TestClip:
    def gradients(self):
        parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 1))]
        parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.full((3, 1), 4.0)
        return parameters, math.sqrt(9 + 3 * 16)

    def test_norm_over_all(self):
        parameters, norm = self.gradients()
        clip(iter(parameters), 2.0)
        torch.testing.assert_close(parameters[0].grad, torch.tensor([3.0, 0.0]) * 2 / norm)
        torch.testing.assert_close(parameters[1].grad, torch.full((3, 1), 4.0) * 2 / norm)

    @pytest.mark.parametrize("norm", [None, 100.0])
    def test_leaves_small_ones_alone(self, norm):
        parameters, _ = self.gradients()
        clip(parameters, norm)
        assert parameters[0].grad.tolist() == [3.0, 0.0]
        assert parameters[1].grad.tolist() == [[4.0]] * 3


# ---- momentum that a method changes


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("kind", ["onecycle", "constant"])
def test_momentum_is_set_for_each_step_from_what_it_would_be(name, kind):
    config = Optim(name=name, schedule=kind, momentum=0.8, betas=(0.7, 0.99))
    plain, changed = (optimizer(config, network()) for _ in range(2))
    schedules = [schedule(config, built, 5, 4) for built in (plain, changed)]

    def of(built):
        group = built.param_groups[0]
        return group["betas"] if name != "sgd" else (group["momentum"], 0.99)

    for number in range(20):
        share, asked = 1 - number / 20, []

        def momentum(usual, which, share=share, asked=asked):
            asked.append((usual, which))
            return share * usual

        set_momentum(config, changed, momentum)
        usual, beta2 = of(plain)
        assert asked == [(usual, name)]
        assert of(changed) == (share * usual, beta2) and beta2 == 0.99
        for built, rates in zip((plain, changed), schedules, strict=True):
            built.step()
            rates.step()
