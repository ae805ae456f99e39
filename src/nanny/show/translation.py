"""The pages on a tensor and on a diff in Chinese: headings, labels and fixed sentences. Findings stay as they were written.

Pages are built in English; here each text that has a line in the table is replaced. {0}, {1} ... stand for what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .tables import Column, Line, Table

_CHINESE = {
    # verdicts
    "{0}: healthy in {1}": "{0}：在 {1} 下正常",
    "{0}, healthy in {1}": "{0}，在 {1} 下正常",
    "{0}: not safe in {1}: {2}": "{0}：在 {1} 下不安全：{2}",
    "{0}, not safe in {1}: {2}": "{0}，在 {1} 下不安全：{2}",
    "{0}: risky in {1}: {2}": "{0}：在 {1} 下有风险：{2}",
    "{0}, risky in {1}: {2}": "{0}，在 {1} 下有风险：{2}",
    "healthy in {0}": "在 {0} 下正常",
    "fix: {0}": "怎么办：{0}",
    "output: {0}": "输出：{0}",
    "output {0} off; at this depth rounding explains about {1}": "输出偏差 {0}；在此深度，舍入可解释约 {1}",
    "loss {0}, {1} {2}": "损失 {0}，{1} 下为 {2}",
    "gradient: not finite in {0} of {1} parameters": "梯度：{1} 个参数中有 {0} 个非有限",
    "gradient {0} off as a whole": "梯度整体偏差 {0}",
    "keep in FP32: {0} ({1} of the parameters)": "保留为 FP32：{0}（占参数的 {1}）",
    "the output error falls from {0} to {1}, goal {2}": "输出误差从 {0} 降到 {1}，目标 {2}",
    "{0}, dim {1} of {2}: index {3} has {4} of the error": "{0}，维度 {1}（长 {2}）：索引 {3} 占误差的 {4}",
    "own: what a module adds on exact inputs; inherited: what the error of its inputs became":
        "自身：输入精确时模块新增的误差；继承：输入误差传到此处的部分",
    "{0} elements, {1} zero, {2} not finite": "{0} 个元素，{1} 个为零，{2} 个非有限",
    "from {0} to {1}, mean {2}, rms {3}": "从 {0} 到 {1}，均值 {2}，均方根 {3}",
    "non-zero magnitudes from {0}, 1 % of them below {1}": "非零绝对值最小 {0}，其中 1 % 低于 {1}",
    "the loudest index is {0} times the median one (rms)": "最大的索引是中位索引的 {0} 倍（均方根）",
    # headings
    "Verdict": "结论", "Advice": "建议", "Error through the model": "误差在模型中的传播", "Notes": "说明",
    "Gradients of parameters": "参数的梯度", "Where the error sits": "误差所在之处", "Range": "范围", "Resolution": "分辨率",
    "Tiles": "分块", "Reductions, against float64": "归约（与 float64 相比）",
    "Dimension {0}, {1} indices": "维度 {0}，{1} 个索引",
    "What the {0} policy ran in which type": "{0} 策略下各运算所用的类型",
    # tables
    "module calls, in the order in which they ended": "模块调用，按结束的先后", "worst first": "误差最大者在前",
    "calls in the first batch": "第一批中的调用次数", "loudest, and quietest": "最大的与最小的",
    "shares of the {0} non-zero finite values, and of their energy": "占 {0} 个非零有限值的比例，及其能量的比例",
    "calls": "次调用", "gradients": "个梯度", "operations": "种运算", "rows": "行",
    "module": "模块", "class": "类", "shape": "形状", "error": "误差", "own": "自身", "inherited": "继承", "centred": "去均值后",
    "max abs": "最大绝对误差", "not finite": "非有限", "parameter": "参数", "of the whole": "占整体",
    "norm in the reference": "参考范数", "operation": "运算", "format": "格式", "become 0": "变为 0", "energy": "能量",
    "subnormal": "次正规", "overflow": "上溢", "headroom": "上溢余量", "footroom": "下溢余量", "scales that fit": "可用的缩放",
    "index": "索引", "max": "最大", "min > 0": "最小（> 0）", "reduction": "归约", "terms": "项数",
    "error of torch's kernel": "torch 内核的误差", "error of acc += x": "逐项累加的误差", "swallowed": "被吞没",
    "condition": "条件数", "measured on": "测量范围",
    # figures
    "relative error": "相对误差", "what rounding explains at this depth": "此深度舍入可解释的部分",
    "full resolution": "完整分辨率", "tile row": "块行", "rms": "均方根", "rms, 2 to the power of": "均方根（2 的幂）",
    "magnitude (2 to the power of); the band is the tensor's": "绝对值（2 的幂）；色带为该张量的范围",
}  # fmt: skip
_LABELS = {"largest ": "最大 ", "1 % below ": "1 % 低于 "}  # in a figure, before a number


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    out = []
    for english, chinese in _CHINESE.items():
        if "{0}" in english:
            parts = re.split(r"\{\d\}", english)
            out.append((re.compile("(.+?)".join(map(re.escape, parts)), re.DOTALL), chinese))
    return out


def translate(text: str, lang: str | None) -> str:
    """The text in the page's language, as it is where the table has no line for it."""
    if lang != "zh":
        return text
    if text in _CHINESE:
        return _CHINESE[text]
    for pattern, chinese in _patterns():
        found = pattern.fullmatch(text)
        if found is not None:
            return chinese.format(*found.groups())
    return text


def translate_line(line: Line, lang: str | None) -> Line:
    return replace(line, text=translate(line.text.strip(), lang))


def translate_table(table: Table, lang: str | None) -> Table:
    columns = tuple(replace(column, title=translate(_head(column), lang)) for column in table.columns)
    return replace(table, columns=columns, title=translate(table.title, lang), rest=translate(table.rest, lang))


def _head(column: Column) -> str:
    return column.title or column.name


def _label(text: str, lang: str | None) -> str:
    for english, chinese in _LABELS.items():
        if lang == "zh" and text.startswith(english):
            return chinese + text.removeprefix(english)
    return text


def translate_figure(figure: Mapping[str, Any], lang: str | None) -> dict[str, Any]:
    """A figure as JSON with its axes, legend and labels translated; layers' names stand in other fields."""
    data = [{**trace, "name": translate(trace["name"], lang)} if "name" in trace else trace for trace in figure["data"]]
    layout = dict(figure["layout"])
    for key in [key for key in layout if re.fullmatch(r"[xy]axis\d*", key)]:
        title = layout[key].get("title")
        if title and "text" in title:
            layout[key] = {**layout[key], "title": {**title, "text": translate(title["text"], lang)}}
    if "annotations" in layout:
        layout["annotations"] = [{**label, "text": _label(label.get("text", ""), lang)} for label in layout["annotations"]]
    return {**figure, "data": data, "layout": layout}
