"""Findings rest on what code does: comments, docstrings and the names that a program gives to its own things change none."""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import tokenize
from pathlib import Path

import pytest
import torch

from nanny.check import Options
from nanny.check.engine import check_source, check_tree

from .test_rules import FIXTURES, reported

FILES = sorted(FIXTURES.glob("*/*.py"))
WORDS = "TODO: master copy, GradScaler, autocast, float16, half, bf16, unscale_, loss_scale, optimizer.step(), scaler.scale(loss)"
# names that torch or a library gives: methods, attributes of what they return, hooks that a framework calls
_TORCH = [
    torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module, torch.nn.Sequential, torch.optim, torch.optim.Optimizer,
    torch.amp, torch.amp.GradScaler, torch.autograd, torch.autograd.Function, torch.cuda, torch.distributed, torch.utils.data,
    torch.utils.data.DataLoader, torch.device, torch.finfo(torch.float16), torch.optim.lr_scheduler.LRScheduler, torch.linalg,
    torch.autograd.function.FunctionCtx, str, dict, list, set, tuple, bytes,
]  # fmt: skip
_LIBRARIES = """
    loss logits values hidden_states last_hidden_state prepare accumulate unwrap_model sync_gradients manual_backward
    clip_gradients
    training_step validation_step configure_optimizers toggle_optimizer optimizers lr_schedulers log log_dict fit predict test
    validate trainer add_histogram add_scalar add_scalars parse_args add_argument info debug warning error enter_context
    to_numpy timestamp time exp sqrt partial nullcontext ExitStack compute_loss setup train_dataloader create_optimizer
    state deepspeed_plugin unscale_gradients clip_grad_norm_ clip_grad_value_
    from_pretrained gradient_checkpointing_enable autocast_smart_context_manager no_sync save_pretrained param_groups"""
LIBRARY = frozenset(name for thing in _TORCH for name in dir(thing)) | frozenset(_LIBRARIES.split())


class Renamed(ast.NodeTransformer):
    """Gives every name of the program itself another one, the same everywhere; keeps torch's, the libraries' and Python's."""

    def __init__(self, tree: ast.Module):
        self.names: dict[str, str] = {}
        self.kept = {*dir(builtins), *keyword.kwlist, "self", "cls"}
        self.roots: set[str] = set()  # what imports bind: attributes below are the library's
        self.parameters: set[str] = set()
        self.methods: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.roots |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
                self.kept |= {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args
                self.parameters |= {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = [n.id for s in node.body if isinstance(s, (ast.AnnAssign, ast.Assign)) for n in _targets(s)]
                self.parameters |= set(fields)
                self.kept |= LIBRARY.intersection(fields)
                self.methods |= {id(statement) for statement in node.body}
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("register_buffer", "register_parameter"):
                self.kept |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}

    def new(self, name: str) -> str:
        if name in self.kept or (name.startswith("__") and name.endswith("__")):
            return name
        return self.names.setdefault(name, f"{'Z' if name[:1].isupper() else 'z'}{len(self.names)}q")

    def attribute(self, name: str) -> str:
        return name if name in LIBRARY else self.new(name)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.new(node.arg)
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _root(node) not in self.roots:
            node.attr = self.attribute(node.attr)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _root(node.func) not in self.roots:
            for word in node.keywords:
                if word.arg in self.parameters and not (isinstance(node.func, ast.Attribute) and node.func.attr in LIBRARY):
                    word.arg = self.new(word.arg)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.new(node.name)
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.name = self.attribute(node.name) if id(node) in self.methods else self.new(node.name)
        self.generic_visit(node)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_alias(self, node: ast.alias) -> ast.AST:
        if node.asname:
            node.asname = self.new(node.asname)
        return node

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        node.names = [self.new(name) for name in node.names]
        return node

    visit_Nonlocal = visit_Global

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self.new(node.name) if node.name else None
        self.generic_visit(node)
        return node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target for target in targets if isinstance(target, ast.Name)]


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def renamed(text: str) -> ast.Module:
    tree = ast.parse(text)
    return Renamed(tree).visit(tree)


def with_comments(text: str, comment: str) -> str:
    """The same lines with every comment replaced; where a statement ends there is one even if there was none."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip() + (f"  # {comment}" if comment else "")
        elif token.type == tokenize.NEWLINE and comment and token.string:
            lines[row - 1] = (
                lines[row - 1].partition("  # ")[0] + f"  # {comment}" if "#" not in lines[row - 1] else lines[row - 1]
            )
    return "\n".join(lines)


def with_docstrings(text: str) -> ast.Module:
    """The same program; every function, class and file has a docstring full of words."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            words = ast.copy_location(ast.Expr(ast.copy_location(ast.Constant(WORDS), first)), first)
            node.body[:] = [words, *(node.body[1:] if ast.get_docstring(node) is not None else node.body)]
    return tree


def of_tree(tree: ast.Module, path: Path) -> set[tuple[int, str]]:
    return {(f.line or 0, f.code) for f in check_tree(tree, path.name, Options())}


@pytest.mark.representative(60)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_comments_change_no_finding(path: Path):
    text = path.read_text()
    expected = reported(text, path.name)
    assert reported(with_comments(text, ""), path.name) == expected
    assert reported(with_comments(text, WORDS), path.name) == expected


@pytest.mark.representative(60)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_docstrings_change_no_finding(path: Path):
    text = path.read_text()
    assert of_tree(with_docstrings(text), path) == reported(text, path.name)


@pytest.mark.representative(60)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_other_names_change_no_finding(path: Path):
    text = path.read_text()
    assert of_tree(renamed(text), path) == reported(text, path.name)


@pytest.mark.representative(60)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_speed_filters_change_no_finding(path: Path):
    text = path.read_text()
    assert of_tree(ast.parse(text), path) == {(f.line or 0, f.code) for f in check_source(text, path.name, Options())}
