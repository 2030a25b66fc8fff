"""Conformance suite of the ``model`` slot, against any reference implementation.

    class TestMine(ModelSuite):
        def make(self, plan, worker):
            return MyFamily(ModelOptions(use="mine"), plan, worker)

        def facts(self):
            return read_folder(FOLDER)

        def tensors(self):
            return load_file(FOLDER / "model.safetensors")

        def reference(self, tensors, ids):
            return other_implementation(torch.tensor([ids])).logits[0]

Small sizes are enough: two layers, and heads of a few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Model, ModelFamily, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup.load_weights import load_model
from glowplug.core.testing.harness.build import DictSource, Stepper, build_context, plan_for

TOKENS = 37  #: tokens of a test's prompt, more than two pages


class ModelSuite:
    """Tests that every model family must pass.

    Attributes:
        tolerance: largest absolute difference of logits from the reference's.
    """

    tolerance = 1e-4

    def make(self, plan: EnginePlan, worker: Worker) -> ModelFamily:
        """Return the family under test."""
        raise NotImplementedError

    def facts(self) -> ModelFacts:
        """Return the facts of a small model."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors, random and by checkpoint name."""
        raise NotImplementedError

    def reference(self, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        """Return the logits after each token of one sequence, [T, V], without a cache."""
        raise NotImplementedError

    # ---- driving ---------------------------------------------------------------------------------

    def built(self) -> tuple[Model, BuildContext]:
        """Return the model without weights, and the context that it was built in."""
        facts = self.facts()
        context = build_context(facts)
        return self.make(plan_for(facts), context.worker).build(context), context

    def stepper(self, tensors: Mapping[str, Tensor] | None = None) -> Stepper:
        """Return a driver of the loaded model."""
        model, context = self.built()
        load_model(model, DictSource(tensors or self.tensors()), self.facts())
        return Stepper(model, context)

    def ids(self, count: int = TOKENS, seed: int = 0) -> list[int]:
        """Return random token ids."""
        generator = torch.Generator().manual_seed(seed)
        found = torch.randint(0, self.facts().vocab_size, (count,), generator=generator)
        return [int(one) for one in found]

    def close(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=self.tolerance, atol=self.tolerance
        )

    # ---- tests -----------------------------------------------------------------------------------

    def test_targets_are_the_checkpoints_tensors(self) -> None:
        """Each tensor has one target of its shape, or the model ignores it."""
        model, _ = self.built()
        targets = {target.name: target for target in model.targets()}
        assert len(targets) == len(list(model.targets())), "two targets have the same name"
        tensors = self.tensors()
        required = {name for name, target in targets.items() if not target.optional}
        assert required <= tensors.keys(), "a target has no tensor"
        left = [name for name in tensors if name not in targets and not model.ignored(name)]
        assert left == [], "tensors without target"
        for name in targets.keys() & tensors.keys():
            assert targets[name].shape == tuple(tensors[name].shape), name

    def test_a_missing_tensor_is_refused_by_name(self) -> None:
        model, _ = self.built()
        tensors = self.tensors()
        names = [target.name for target in model.targets() if not target.optional]
        assert names, "every target is optional"
        for name in (names[0], names[-1]):
            model, _ = self.built()
            rest = {key: value for key, value in tensors.items() if key != name}
            with pytest.raises(WeightError, match=name.replace(".", r"\.")):
                load_model(model, DictSource(rest), self.facts())

    def test_a_prompt_has_the_references_logits(self) -> None:
        tensors = self.tensors()
        ids = self.ids()
        got = self.stepper(tensors).logits({0: ids})
        assert got.dtype == torch.float32 and got.shape == (len(ids), self.facts().vocab_size)
        self.close(got, self.reference(tensors, ids))

    @pytest.mark.parametrize("cuts", [(1,), (16,), (15, 17, 32), (5, 36)])
    def test_chunks_have_the_references_logits(self, cuts: tuple[int, ...]) -> None:
        tensors = self.tensors()
        ids = self.ids()
        stepper = self.stepper(tensors)
        ends = [0, *cuts, len(ids)]
        parts = [stepper.logits({0: ids[a:b]}) for a, b in zip(ends, ends[1:], strict=False)]
        self.close(torch.cat(parts), self.reference(tensors, ids))

    def test_decoding_has_the_references_logits(self) -> None:
        tensors = self.tensors()
        ids = self.ids()
        stepper = self.stepper(tensors)
        stepper.logits({0: ids[:20]})
        parts = [stepper.logits({0: [token]}, decodes=1) for token in ids[20:]]
        self.close(torch.cat(parts), self.reference(tensors, ids)[20:])

    def test_rows_of_a_step_do_not_mix(self) -> None:
        """Decoding rows and a prompt share a step."""
        tensors = self.tensors()
        rows = {row: self.ids(11 + 6 * row, seed=row) for row in range(3)}
        stepper = self.stepper(tensors)
        stepper.logits({row: ids[:-1] for row, ids in rows.items() if row})
        prompt = rows.pop(0)
        got = stepper.logits({**{row: ids[-1:] for row, ids in rows.items()}, 0: prompt}, decodes=2)
        expected = [self.reference(tensors, ids)[-1:] for ids in rows.values()]
        self.close(got, torch.cat([*expected, self.reference(tensors, prompt)]))

    def test_every_tensor_counts(self) -> None:
        """A tensor that is changed changes the logits; one that does not is not used."""
        tensors = self.tensors()
        ids = self.ids(9)
        usual = self.stepper(tensors).logits({0: ids})
        model, _ = self.built()
        for target in model.targets():
            if target.name in tensors:
                value = tensors[target.name]
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
                changed = {**tensors, target.name: value + 0.3 * noise.to(value.dtype)}
                assert not torch.equal(self.stepper(changed).logits({0: ids}), usual), target.name
