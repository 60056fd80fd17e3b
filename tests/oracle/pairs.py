"""A bounded number of seeds that cover pairs of values of two axes.

Run as a script it looks for them: `python -m tests.oracle.pairs` prints the seeds to be put below.
"""

from __future__ import annotations

import itertools

from tests.oracle.case import AXES, Case, draw

DENSE = 14
"""Axes with odd values in such a case: most of them fall back, and must do so without a trace."""
LOOKED_AT = 4000
SEEDS = tuple(
    int(seed)
    for seed in """
0 53 3185 359 3088 2330 2628 3478 2194 976 2676 2092 1386 482 2842 3594 1257 56 574 3004 2406 1683
2175 102 2535 2339 2582 2397 1731 2915 2426 1051 1000 3642 1791 3313 91 3462 2622 1734 624 3872 190
881 2184 2313 1453 589 3652 792 2237 1907 2245 531 885 1186 2055 1187 1354 85 3940 691 2174 701 2301
1320 2436 1418 2419 1990 2434 3175 304 690 918 1207 2772 3922 1519 1682 3705 3025 1108 2636 3041
2043 276 2331 2456 2957 3667 2963 3585 2502 3119 1435 3743 648 1571 1482 1294 3053 571 1119 1261
3814 696 753 949 1945 93 2350 1375 808 1454 1606 3228 35 134 980 1610 2113 2347 3243 2983 3511 3927
532 2615 2955 3863 1197 3249 3816 3866 473 2303 2391 816 1317 1780 315 1031 1135 1702 1905 2001 2496
2600 3133 526 595 1987 2379 3540 607 2574 2716 2909 3272 3879 3887 202 1105 1609 1980 2031 2131 2470
2703 7 211 330 1021 1468 1785 2191 2228 2432 2618 2668 2726 3001 3367 3449 69 197 1525 1839 2669
2744 299 382 629 877 1113 1230 1285 2096 2968 3416 84 179 184 561 1171 1203 1484 1513 1799 2608 2696
3459 3506 3612 3900 3932 57 510 599 1096 1109 1218 1384 1409 2528 3827 121 167 223 227 248 312 551
620 724 893 1138 1660 1872 1936 2290 2748 2858 3260 3556 3890 24 103 129 133 187 373 415 439 465 511
518 637 645 774 777 823 883 1076 1524 1890 1981 2153 2486 2619 3038 3061 3065 3172 3274 18 101 221
309 735 841 874 878 942 966 1050 1324 1378 1427 1621 1679 2070 2093 2156 2271 2276 2643 3013 3339
3976 3979 19 45 50 71 82 92 98 99 109 111 125 145 164 170 193 199 209 252 257 308 314 346 520 579
580 583 631 643 712 799 855 857 896 999 1136 1639 1654 2164 2337 2403 3074 3235 3501 3521
""".split()
)
"""Found by `covering`: every pair that the first LOOKED_AT seeds have."""


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
