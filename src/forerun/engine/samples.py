"""Sample texts for measurements at the start of an engine: prose, code, a table and a dialogue, a few lines of each."""

SAMPLES = (
    """The harbour lay quiet in the early morning. Two boats had come in during the night, and their crews were asleep
below deck. On the quay an old man was mending a net, slowly and with great care, as he had done every day for forty
years. When the first buses arrived, he looked up, nodded to the drivers, and went on with his work. Nobody asked him
why he never went to sea himself.""",
    '''def merge_intervals(intervals):
    """Return the union of closed intervals as a sorted list of disjoint ones."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class IntervalTest(unittest.TestCase):
    def test_merge(self):
''',
    """| city | country | population | river |
| --- | --- | --- | --- |
| Lisbon | Portugal | 545,000 | Tagus |
| Vienna | Austria | 1,980,000 | Danube |
| Prague | Czech Republic | 1,360,000 | Vltava |
| Cologne | Germany | 1,090,000 | Rhine |
""",
    """Question: My train leaves at 9:40, and the way to the station takes 25 minutes on foot. When should I leave if I
want to be there ten minutes early?
Answer: You want to be there at 9:30. The way takes 25 minutes, so you should leave at 9:05.
Question: And if I take the bus, which needs 12 minutes and leaves every full quarter of an hour?
Answer:""",
)
