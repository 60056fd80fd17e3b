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
0 680 3594 137 949 2250 677 3752 3197 2027 2498 2235 531 2385 3151 3126 1784 2913 276 2297 780
1409 2272 491 3367 179 1384 419 310 662 1468 826 1327 3855 2628 379 3748 2405 1907 966 238 1978
225 1031 792 819 304 2660 3459 2456 18 2610 1047 2659 3911 3596 3866 1435 2950 2909 213 2892 690
219 1912 1169 2307 2662 492 3872 3235 3270 2547 3243 1445 632 2777 1773 2259 2629 287 1818 604
3014 701 3827 2470 2661 2668 2676 1785 1320 1071 2893 3265 3969 1566 85 60 1952 2073 2643 3743
103 799 286 50 1054 1901 3025 3043 3292 134 1903 2574 100 1880 781 811 874 1681 1722 2347 2834
111 1373 3006 3040 3601 3850 3896 1858 1868 3941 283 1186 1598 2067 3586 208 800 1214 557 1403
1512 2881 3203 3397 3816 465 561 578 991 1854 2180 3474 3728 2 244 1294 1520 1529 1592 1936 2895
3092 3620 277 526 3209 3456 3712 84 167 425 891 1109 1600 1735 2172 2535 2663 3082 3293 87 171
330 518 532 543 1212 1929 2508 2626 2715 2915 3346 252 381 1010 1060 1205 1664 1739 2432 2908
3083 3249 3344 3898 33 63 90 338 571 595 673 735 999 1100 1428 1693 2124 2633 2751 3074 3361
3394 3614 95 117 232 236 356 454 474 700 980 1020 1207 1283 1499 1898 2096 2348 2618 2838 2884
3026 3053 3377 51 121 133 263 362 400 462 487 542 809 832 1091 1287 1394 1418 1661 2262 2268
2277 2336 2682 2744 3170 3530 3924 67 72 77 80 99 106 169 182 187 191 196 204 227 382 384 385
456 477 536 570 594 629 643 816 877 886 1134 1271 1397 1453 1678 1716 2212 2957 3676
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
