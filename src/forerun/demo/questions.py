"""The demo's questions for a chat model: one of each kind that Spec-Bench asks, short enough to be read in the demo."""

from __future__ import annotations

PASSAGE = (
    "The lighthouse on Gull Island was built in 1874 after three ships were lost on the reef in one winter. Its lamp "
    "burned oil until 1931, when a cable brought electricity from the mainland. The last keeper, Ellen Marsh, left in "
    "1982, and since then the light has run by itself. Volunteers paint the tower every second summer, and in August "
    "visitors may climb its 112 steps."
)
QUESTIONS = {
    "writing": "Give me three tips for sleeping better.",
    "coding": "Write a Python function that returns the largest number in a list, and explain it in one sentence.",
    "translation": "How do you say 'Good morning, how are you?' in Spanish, French and Italian?",
    "summary": f"Summarize this text in two sentences.\n\n{PASSAGE}",
    "knowledge": "Why is the sky blue? Answer in three sentences.",
    "maths": "A box holds 12 eggs. A cook buys 4 boxes and uses 30 eggs. How many eggs are left? Show each step.",
    "passage": f"{PASSAGE}\n\nWhen was the lighthouse built, and who was its last keeper?",
    "extraction": "Extract the name, the city and the job from this text as JSON: Maria Lopez is a nurse in Madrid.",
}
