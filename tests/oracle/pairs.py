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
0 491 1166 1405 3495 1683 1051 3972 1409 2064 2576 2913 3175 2983 1228 2385 2635 2406 949 1866
1773 180 492 690 2297 1691 791 679 3523 381 2282 1287 3107 2048 677 2628 451 1518 712 136 1664
3370 3617 3313 2547 19 266 1327 35 2502 109 2184 2045 2676 579 976 1509 745 3541 1573 2582 1186
2456 2470 1119 1386 1913 3816 1995 445 2834 1275 1681 2448 1072 1484 3293 1278 991 3309 1512 1529
2177 3130 1524 3546 3596 1839 1854 1760 3053 2163 2451 161 2838 3732 167 473 2301 1207 2626 2318
2466 2668 2971 3237 1567 2235 2371 3748 1723 2237 225 342 3494 3679 207 2629 3323 3353 430 781
2002 2535 312 1350 1501 1791 3694 3896 1373 2133 2367 2950 711 2043 2347 3210 344 500 1071 1171
3594 283 470 980 1890 2076 2772 3850 3887 179 874 1907 2426 169 799 1931 2455 3497 3515 237 475
583 616 637 1494 1719 1986 2339 3641 3866 465 1430 1734 1895 2054 2077 3209 3905 244 680 1821 1945
2185 2268 2272 2350 3433 3818 87 263 556 2362 2643 2748 2893 3203 3562 3620 111 133 222 426 456
805 823 1238 1510 1716 2368 2522 2781 3235 3558 50 64 126 166 442 501 735 1138 1263 1736 2073 3344
13 139 168 170 290 326 339 361 546 643 780 825 1334 1445 1592 1627 1855 1908 1952 2096 2191 2991
3065 3527 3723 12 182 196 286 305 310 319 356 367 494 518 646 662 770 802 813 815 1169 1187 1262
1376 1397 1453 1476 1641 2059 2139 2180 2277 2609 2705 2744 3025 3211 56 67 84 106 121 157 187 204
227 262 384 408 486 517 531 559 566 629 673 811 855 923 982 999 1063 1084 1134 1315 1602 1678 1808
2112 2212 2370 2432 2957 3074 3260
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
