"""A bounded number of seeds that cover pairs of values of two axes.

Run as a script it looks for them: `python -m tests.oracle.pairs` prints the seeds to be put below.
"""

from __future__ import annotations

import itertools

from tests.oracle.case import AXES, Case, draw

DENSE = 14
"""Axes with odd values in such a case: most of them fall back, and must do so without a trace."""
LOOKED_AT = 1500
SEEDS = (
    *(0, 244, 1228, 496, 19, 54, 1215, 1207, 276, 1185, 70, 209, 3, 1489),
    *(1114, 489, 611, 608, 1494, 824, 953, 491, 111, 949, 202, 1192, 781, 662),
    *(1054, 136, 390, 103, 1283, 1032, 119, 813, 780, 673, 35, 50, 142, 376),
    *(23, 1169, 1275, 1243, 874, 650, 985, 1099, 1118, 651, 994, 425, 473, 310),
    *(882, 631, 1142, 1197, 498, 622, 1455, 925, 500, 1168, 1277, 714, 160, 324),
    *(379, 382, 686, 1350, 409, 1131, 253, 927, 712, 153, 506, 1324, 341, 612),
    *(920, 1372, 492, 620, 472, 1031, 1390, 225, 668, 107, 330, 403, 582, 1247),
    *(1278, 338, 745, 438, 447, 809, 1010, 167, 1241, 1287, 156, 1216, 1235, 630),
    *(940, 1063, 1147, 1409, 680, 811, 1028, 315, 1456, 60, 109, 273, 857, 263),
    *(556, 968, 1138, 128, 295, 335, 587, 802, 1011, 155, 277, 361, 1055, 1143),
    *(1252, 94, 108, 247, 254, 1442, 116, 446, 451, 454, 559, 598, 45, 179),
    *(285, 419, 453, 465, 643, 676, 692, 989, 1162, 1334, 189, 511, 570, 626),
    *(641, 690, 747, 782, 850, 1026, 1027, 1035, 197, 700, 777, 886, 1085, 1155),
    *(1171, 1445, 12, 154, 266, 278, 283, 342, 367, 480, 516, 618, 791, 801),
    *(841, 1376, 87, 117, 161, 220, 317, 616, 624, 638, 657, 695, 765, 789),
    *(819, 959, 965, 975, 1212, 1459, 170, 183, 355, 431, 444, 481, 487, 497),
    *(645, 768, 861, 905, 943, 969, 1343, 1400, 30, 36, 48, 96, 101, 157),
    *(159, 169, 195, 196, 203, 221, 262, 270, 402, 485, 517, 567, 580, 607),
    *(627, 703, 783, 978, 1100, 1116, 1193, 1281, 1363, 1370, 1397, 1407, 1450, 4),
    *(10, 51, 88, 97, 100, 194, 218, 242, 243, 248, 301, 319, 345, 396),
    *(452, 466, 470, 534, 538, 564, 648, 654, 659, 670, 711, 726, 735, 930),
    *(967, 1000, 1077, 1082, 1109, 1176, 1208, 1345, 1359, 1452, 6, 15, 24, 33),
    *(46, 75, 76, 84, 85, 86, 92, 99, 132, 144, 148, 171, 174, 175),
    *(207, 216, 227, 267, 279, 293, 311, 343, 347, 353, 365, 370, 385, 398),
    *(408, 426, 471, 482, 543, 555, 569, 576, 679, 683, 691, 713, 719, 749),
    *(767, 868, 913, 923, 931, 934, 976, 996, 1006, 1044, 1084, 1183, 1198, 1264),
    *(1271, 1294, 1308, 1395, 1434, 1462),
)
"""Found by `covering`: every pair that the first 1,500 seeds have."""


def pairs(case: Case) -> set[tuple[str, str, str, str]]:
    """Every two values of a case."""
    values = [(name, getattr(case, name)) for name in AXES]
    return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def cases() -> list[Case]:
    """The cases of the seeds."""
    return [draw(seed, 1, DENSE) for seed in SEEDS]


def covering(most: int, seeds: int) -> tuple[list[int], int, int]:
    """Seeds, greedily: each has the most pairs that none before it had.

    Args:
        most: seeds to be found at most.
        seeds: how many are looked at.

    Returns:
        The seeds, how many pairs they cover, and how many all that were looked at do.
    """
    numbers: dict[tuple[str, str, str, str], int] = {}
    masks: dict[int, int] = {}
    for seed in range(seeds):
        found = pairs(draw(seed, 1, DENSE))
        masks[seed] = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)
    gains = dict.fromkeys(masks, len(numbers))
    chosen: list[int] = []
    seen = 0
    while len(chosen) < most:
        best = max(gains, key=gains.__getitem__)
        true = (masks[best] & ~seen).bit_count()
        if true < gains[best]:  # a gain only shrinks: look again
            gains[best] = true
            continue
        if not true:
            break
        chosen.append(best)
        seen |= masks[best]
        del gains[best]
    return chosen, seen.bit_count(), len(numbers)


if __name__ == "__main__":
    print(*covering(10_000, LOOKED_AT))
