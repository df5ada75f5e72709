"""Faults in the rest of `megacompile` and of `passes`: options, `compat`, processes, templates."""

from __future__ import annotations

from tests.faults.fault import Fault

TOP = (
    Fault(
        "api-accumulate-nested",
        "megacompile/api.py",
        "        steps.marked = before\n",
        "        steps.marked = False\n",
        "The end of an inner accumulate() block ends the outer one.",
    ),
    Fault(
        "api-other-options",
        "megacompile/api.py",
        "if changes := present.options.differences(options):",
        "if (changes := present.options.differences(options)) and checkpoint is not None:",
        "megacompile() of a megacompiled model ignores other options.",
    ),
    Fault(
        "option-slots",
        "megacompile/option_checks.py",
        "if number < lookahead + 1:",
        "if number < lookahead:",
        "slots= that are one too few for lookahead= are not refused.",
    ),
    Fault(
        "option-optimizer",
        "megacompile/option_checks.py",
        "if rule is not None and not why_not:",
        "if rule is not None:",
        "An optimizer whose variant has no update of ours is taken as optimizer=.",
    ),
    Fault(
        "size-units",
        "megacompile/option_values.py",
        "        if unit and not binary:\n",
        "        if unit and binary:\n",
        '"20GB" and "20GiB" are mixed up.',
    ),
    Fault(
        "mesh-options-alike",
        "megacompile/options.py",
        "if value != of_ranks[0][name]:",
        "if value != of_ranks[rank][name]:",
        "Ranks that were given different options are not refused.",
    ),
    Fault(
        "validate-shared-memory",
        "megacompile/validate.py",
        "if size_bytes and other_start < start + size_bytes:",
        "if size_bytes and other_start == start:",
        "Parameters whose memory overlaps in part are not refused.",
    ),
    Fault(
        "validate-frozen-packed",
        "megacompile/validate.py",
        "    if param.requires_grad:\n        raise ModelError(",
        "    if param.requires_grad and param.grad is not None:\n        raise ModelError(",
        "A packed parameter that requires grad is not refused.",
    ),
    Fault(
        "restoring-unchecked",
        "megacompile/lifetime.py",
        "    for each in pending:\n        each.check()\n",
        "",
        "restoring() that has restored half of it ends without an error.",
    ),
    Fault(
        "released-after-error",
        "megacompile/lifetime.py",
        "        streamed.released.end(failed=True)\n",
        "        assert streamed.released\n",
        "After an error in a released() block, the model cannot be used any more.",
    ),
    Fault(
        "full-parameters-unmerged",
        "megacompile/lifetime.py",
        "    refuse_unmerged(inner)\n",
        "",
        "full_parameters() gives base weights of an adapter that is not merged.",
    ),
    Fault(
        "host-limit-ignored",
        "megacompile/host_memory.py",
        "return free if limit_bytes is None else min(free, limit_bytes)",
        "return free",
        "A model that does not fit host_memory= is not refused at the start.",
    ),
    Fault(
        "packed-shared",
        "megacompile/packed.py",
        "if owner.setdefault(id(member.tensor), id(param)) != id(param):",
        "if owner.setdefault(id(member.tensor), id(param)) is None:",
        "Packed parameters that share a table of codes write to each other's bucket.",
    ),
    Fault(
        "numa-cores",
        "megacompile/numa.py",
        "found.update(range(int(first), int(last or first) + 1))",
        "found.update(range(int(first), int(last or first)))",
        "The last core of each range is left out.",
    ),
    Fault(
        "notice-of-all",
        "megacompile/notices.py",
        "if whose is Whose.ALL and not _rank.is_first:",
        "if whose is Whose.ALL and _rank.is_first:",
        "The first rank keeps a notice to itself, and all others say it.",
    ),
    Fault(
        "progress-line-stays",
        "megacompile/progress.py",
        "        _lines.remove(mine)\n",
        "",
        "After the first wait, later ones are told under its name, or not at all.",
    ),
)

BESIDE = (
    Fault(
        "pool-process-leak",
        "megacompile/beside/compile_pool.py",
        "        process.stop()\n        if self.is_over:",
        "        if self.is_over:",
        "Processes that compile do not end.",
    ),
    Fault(
        "process-children-leak",
        "megacompile/beside/process.py",
        "            os.killpg(process.pid, signal.SIGKILL)  # with what it started\n",
        "            process.kill()\n",
        "What a process that compiles has started lives on.",
    ),
    Fault(
        "process-over",
        "megacompile/beside/process.py",
        "        except BrokenPipeError:\n            pass",
        "        except BrokenPipeError:\n            raise",
        "A process that ends at once breaks off the user's step.",
    ),
)

CLI = (
    Fault(
        "cli-longest",
        "megacompile/cli/source.py",
        "if isinstance(longest, int) and seq > longest:",
        "if isinstance(longest, int) and seq >= longest:",
        "--seq of the config's whole length is refused.",
    ),
    Fault(
        "cli-batch-tokens",
        "megacompile/cli/target.py",
        "        (tokens,),\n        {},\n        batch * seq,\n",
        "        (tokens,),\n        {},\n        seq,\n",
        "The plan of a config counts the tokens of one sequence as those of a step.",
    ),
    Fault(
        "cli-dtype",
        "megacompile/cli/target.py",
        "        if param.is_floating_point():\n",
        "        if param.is_floating_point() and param.dim() > 1:\n",
        "--dtype leaves norms and biases in float32.",
    ),
)

COMPAT = (
    Fault(
        "saved-hooks-order",
        "megacompile/compat/autograd.py",
        "for pack, unpack in reversed(hooks):",
        "for pack, unpack in hooks:",
        "Two saved_tensors_hooks of the user's are put back in the other order.",
    ),
    Fault(
        "backward-call-stays",
        "megacompile/compat/autograd.py",
        "            _BACKWARD_CALLS.remove(call)\n",
        "",
        "A backward that is over counts as one that runs.",
    ),
    Fault(
        "accumulates-unknown",
        "megacompile/compat/autograd.py",
        "        return None\n\n\ndef accumulates_into_all",
        "        return True\n\n\ndef accumulates_into_all",
        "What autograd.grad() asks for goes to p.grad too.",
    ),
    Fault(
        "compile-settings-stay",
        "megacompile/compat/caches.py",
        "        _use(before)\n",
        "        assert before\n",
        "The user's settings of Inductor are those of an update after it was compiled.",
    ),
    Fault(
        "inputs-not-first",
        "megacompile/compat/graphs.py",
        "            nodes[first].prepend(node)\n",
        "            assert nodes[first] is not node\n",
        "A captured graph whose inputs come late is refused.",
    ),
    Fault(
        "deque-copies",
        "megacompile/compat/variables.py",
        'if name in ("copy", "__copy__") and',
        'if name in ("__copy__",) and',
        "A copy of a bounded deque is captured as an unbounded one.",
    ),
    Fault(
        "recompiles-logged",
        "megacompile/compat/dynamo.py",
        '            artifacts.discard("recompiles")\n',
        "            pass\n",
        "torch logs every recompilation once captures were counted.",
    ),
    Fault(
        "copies-keep-model",
        "megacompile/compat/modules.py",
        "return {name: item for name, item in value.items() if not isinstance(item, kinds)}",
        "return dict(value)",
        "A copy of a megacompiled model calls the original.",
    ),
    Fault(
        "scaler-disabled",
        "megacompile/compat/autograd.py",
        "if self.is_enabled() else ():",
        "if scaled is not None else ():",
        "A GradScaler that is off is refused with optimizer=.",
    ),
    Fault(
        "state-dtypes-lost",
        "megacompile/compat/autograd.py",
        'if key != "step" and any(mine(param) for mine in _STATES_KEPT):',
        'if key == "step" and any(mine(param) for mine in _STATES_KEPT):',
        "load_state_dict() casts states of state_dtype= to the parameters' dtype.",
    ),
    Fault(
        "own-storage-short",
        "megacompile/compat/tensors.py",
        "count = 1 + sum((n - 1) * step for",
        "count = sum((n - 1) * step for",
        "The storage of a parameter that the user asks for lacks its last element.",
    ),
)

STAGES = (
    Fault(
        "template-key-ambient",
        "passes/stages/templates.py",
        "key = (code, metas, params, stage.mutated, stage.live, given, lowering, ambient)",
        "key = (code, metas, params, stage.mutated, stage.live, given, lowering)",
        "Templates are shared between autocast and its absence.",
    ),
    Fault(
        "template-view-of-slot",
        "passes/stages/templates.py",
        "                    outputs[k] = tensor.clone()\n",
        "                    outputs[k] = tensor.view_as(tensor)\n",
        "A view of a weight leaves its stage, and its slot is overwritten.",
    ),
    Fault(
        "template-mutated",
        "passes/stages/templates.py",
        "inputs[i] = primals[i].clone()",
        "inputs[i] = primals[i].view_as(primals[i])",
        "A backward reads a buffer as it is after its change.",
    ),
    Fault(
        "planned-for-key",
        "passes/stages/templates.py",
        "key = (template, tuple(planned.items()))",
        "key = (template, tuple(planned))",
        "A plan for some sizes is taken for all sizes.",
    ),
    Fault(
        "lower-failed-used",
        "passes/stages/lower.py",
        "            if id(template.code) not in self._failed:\n",
        "            if self._failed is not None:\n",
        "Half of a template's code is replaced when the rest could not be compiled.",
    ),
    Fault(
        "tile-rest",
        "passes/stages/tile.py",
        "return (length, rest) if rest else (length,)",
        "return (length,)",
        "The tokens behind the last whole tile are computed in a tile of the wrong length.",
    ),
)

FAULTS = (*TOP, *BESIDE, *CLI, *COMPAT, *STAGES)
