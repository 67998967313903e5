"""Prompts of the agents. ``agentflow_prompts`` of ``--custom-config-path`` replaces any of these texts.

Texts are formatted with what stands in braces; a literal brace is written twice.
"""

from __future__ import annotations

PROMPTS = {
    # of the planner's messages: one tool, and one step that was taken
    "tool": (
        "{name}: {description}\n  input: {input_types}\n  output: {output_type}\n  example: {demo_commands}\n"
        "  limitations: {limitations}\n  best practice: {best_practice}"
    ),
    "step": (
        "Action Step {number}:\n  tool: {tool_name}\n  sub-goal: {sub_goal}\n  command: {command}\n  result: {result}"
    ),
    "analysis": (
        "Analyze a query: which skills does it take, and which of the tools help?\n\nQuery: {query}\n\n"
        "Tools:\n{tools}\n\nBe brief, and do not solve it."
    ),
    "planner": (
        "You plan the next step to answer a query with tools.\n\nQuery: {query}\n\nAnalysis: {analysis}\n\n"
        "Tools: {tool_names}\n\n{tools}\n\nPrevious steps:\n{steps}\n\n"
        "Choose exactly one tool and what it is to achieve. It sees nothing but what you write into the context. "
        "Finish with these three lines:\n"
        "Context: everything that the tool needs to know\nSub-Goal: what it is to achieve\nTool Name: its exact name"
    ),
    "executor": (
        "Write the call of a tool.\n\nQuery: {query}\n\nSub-goal: {sub_goal}\n\nContext: {context}\n\nTool:\n{tool}\n\n"
        "Answer with a block of Python with one call, whose arguments are literals:\n"
        '```python\nexecution = tool.execute(query="...")\n```'
    ),
    "verifier": (
        "Do the steps that were taken suffice to answer the query?\n\nQuery: {query}\n\nAnalysis: {analysis}\n\n"
        "Tools:\n{tools}\n\nSteps:\n{steps}\n\n"
        "Look for gaps, contradictions and results that need to be checked. End with the line `Conclusion: STOP` when "
        "they suffice, else `Conclusion: CONTINUE`."
    ),
    "final": (
        "Answer a query with what was found.\n\nQuery: {query}\n\nSteps:\n{steps}\n\n"
        "Sum up in a few sentences what was done, then write the answer, as short as possible, in <answer></answer>."
    ),
    "base_generator": "{query}",
    "python_coder": (
        "Write a Python program that prints the answer. It may import math, random, datetime, collections, itertools, "
        "functools, operator, statistics, decimal and fractions, and has ten seconds.\n\nTask: {query}\n\n"
        "Answer with one block:\n```python\n...\n```"
    ),
    "judge": (
        "Is an answer right?\n\nQuestion: {query}\n\nRight answer: {label}\n\nAnswer: {answer}\n\n"
        "It is right when it means the same; other notation and units that are understood do not matter. End with the "
        "line `VERDICT: True` or `VERDICT: False`."
    ),
}
