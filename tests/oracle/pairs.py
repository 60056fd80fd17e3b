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
0 3003 2314 2147 1979 609 1228 726 2308 743 1482 2665 1134 984 1936 280 348 3032 1174 979 2954 2425
848 3840 812 846 1111 181 3457 2246 2605 3375 1290 1856 3519 3347 1768 3735 921 3927 2617 1718 2364
3952 2526 2904 3106 3262 3683 1706 434 1074 3312 3502 1567 1820 3218 2221 2894 3656 383 1518 381
866 3251 3071 2669 449 1337 2005 83 3474 805 3547 3692 972 1289 2176 1231 3754 3933 1345 2478 3272
2241 3018 1436 3063 2003 3902 1552 3654 700 1034 2620 2470 3859 1281 3714 621 2169 2891 1023 2821
2278 3224 3386 3406 3622 3346 1050 1594 1777 3503 1043 1895 3470 531 633 1328 2711 201 1710 128 184
601 3350 3610 735 1417 3466 462 956 1725 2585 2653 3689 771 863 889 1365 1468 3822 766 1734 1862
2693 3274 3292 437 1654 2163 51 312 970 1546 1890 2076 1954 2414 2545 3201 3536 4 245 1113 1563
1830 2632 2903 3554 3858 2313 2506 3039 3866 714 778 1087 1485 1978 2251 3311 3636 3831 20 1250
1984 2753 2822 3266 34 213 263 324 1309 1506 1764 2879 301 491 523 1268 1415 2046 3082 3741 3745
3762 163 232 270 540 598 1114 2159 2411 2467 2832 2942 288 549 644 844 845 1010 1870 2207 2433 2464
3199 321 338 665 816 879 936 1479 1624 2158 2587 2948 3007 3376 258 304 506 856 916 1004 1145 1167
1378 1623 1751 1922 2280 3033 3194 3508 3645 235 502 625 698 983 999 1093 1334 1357 1573 1673 1926
2144 2686 2965 3219 3392 3548 3740 3781 3990 332 575 836 1084 1303 1389 1435 1541 1875 2085 2088
2135 2228 3190 3443 3780 3883 24 125 202 250 331 334 730 1069 1193 1260 1405 1452 1686 1951 2066
2220 2266 2569 2829 2905 3332 3426 3440 3813 8 135 136 154 274 310 444 464 701 728 951 952 1431
1574 1780 1819 1827 1834 1923 1959 2434 2550 2802 3053 3095 3112 3122 3523 3589 3912 44 59 78 98
123 203 204 217 246 371 394 557 563 580 617 738 759 801 961 988 997 1531 1705 1790 1883 1913 1962
2016 2213 2275 2413 2514 2685 2775 2785 3753 3950 9 14 37 67 74 95 162 207 242 277 319 355 391 410
414 548 675 739 806 831 838 867 923 942 991 1197 1199 1225 1308 1548 1572 1714 1755 1831 1901 2042
2049 2101 2122 2129 2155 2214 2282 2290 2335 2353 2400 2521 2567 2915 2927 2931 2945 3013 3023 3136
3183 3202 3235 3352 3464 3614 3704 3965 3991 2 7 13 52 55 63 97 112 205 249 275 282 311 353 390 426
447 489 520 538 611 615 635 666 667 729 762 793 825 900 904 995 1035 1152 1179 1218 1255 1257 1286
1310 1447 1476 1489 1534 1564 1566 1665 1689 1749 1938 1949 2185 2209 2355 2643 2680 3000 3268 3522
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
