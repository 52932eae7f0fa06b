// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/channel_groups.hpp  ChannelGroups: KIVI's asymmetric codes, keys per channel
/// over groups of tokens, values per token over groups of channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/quantizer/level_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Quantizer policy of KIVI (arXiv 2402.02750, section 3.2): x^ = q s + m, with m the least
/// of a group, s = (largest - least) / (2^bits - 1), both in f16, and q = round((x - m) / s).
/// |x - x^| <= s / 2.
///
/// A group of a key is one channel of `tokens` successive rows, a group of a value `channels`
/// channels of one row. The latest rows, KIVI's residual, are the token policy's (RecentFull): at
/// least R of them stay at full rank, where KIVI itself codes all R keys when R have gathered.
/// Bytes of a key and its value: (2 bits + 32 / tokens) head_dim / 8 + 4 ceil(head_dim / channels).
///
/// Rows leave the tail in whole groups: flush_interval is a multiple of `tokens`, and so are the
/// rows of a prompt; what is left over waits in the tail. A group is coded from all its rows at
/// once, and a stored row never changes, through appends, forks, save and load.
///
/// Two calls move the border of groups: remove() of tokens that are stored, and truncate() into
/// stored rows that ends inside a group. Rows then join rows of another group. Where their channel
/// does not fit the least and the step there, both cover the union, and the rows of that group that
/// are there already are coded again: each time a row can lose s / 2 more, s the wider step. A
/// remove() does this at most twice a group, the flush after a truncate() once for one group. Cost:
/// `tokens` rows of a group. Certificates know nothing of it: keep_residuals is refused.
struct ChannelGroups {
  int bits = 2;       ///< 1 to 8; the paper has 2 and 4
  int tokens = 32;    ///< of a group of keys, a multiple of 8
  int channels = 32;  ///< of a group of values
  friend bool operator==(const ChannelGroups&, const ChannelGroups&) = default;
};

/// @brief Checks the parameters. @throws ValueError naming the value
inline void check_channel_groups(const ChannelGroups& policy) {
  using detail::fail;
  if (policy.bits < 1 || policy.bits > 8)
    fail<ValueError>("ChannelGroups: bits are 1 to 8, given ", policy.bits);
  if (policy.tokens < 8 || policy.tokens > 4096 || policy.tokens % 8 != 0)
    fail<ValueError>("ChannelGroups: tokens are a multiple of 8, 8 to 4096, given ", policy.tokens);
  if (policy.channels < 1)
    fail<ValueError>("ChannelGroups: channels are at least 1, given ", policy.channels);
}

/// @brief The layout of one head's keys or values.
///
/// A block of keys of R rows holds for each group of rows `rank` pairs of f16 numbers, scale and
/// minimum; then for each channel a line of R codes. Values: level_layout.hpp.
struct ChannelGroupLayout {
  bool keys = true;
  int rank = 0;
  int bits = 2;
  int tokens = 32;
  LevelLayout values;        ///< if they are values
  std::uint64_t format = 0;  ///< tells layouts of equal sizes apart in saved sequences

  std::int64_t row_bits() const {
    if (!keys) return values.row_bits();
    return std::int64_t{rank} * bits + (std::int64_t{32} * rank + tokens - 1) / tokens;
  }
  /// @brief Byte at which the numbers of a group of keys begin.
  std::size_t group_numbers(int group) const {
    return 4 * static_cast<std::size_t>(group) * static_cast<std::size_t>(rank);
  }
  /// @brief Byte at which the codes of a channel of keys begin in a block of `rows` rows.
  std::size_t code_line(int channel, int rows) const {
    return group_numbers((rows + tokens - 1) / tokens) +
           static_cast<std::size_t>(channel) * packed_bytes(rows, bits);
  }
  std::size_t block_bytes(int rows) const {
    return !keys ? values.block_bytes(rows) : code_line(rank, rows);
  }
};

/// @brief The layout of rows of `rank` coefficients.
inline ChannelGroupLayout channel_group_layout(const ChannelGroups& policy, bool keys, int rank) {
  return {keys,
          rank,
          policy.bits,
          policy.tokens,
          {rank, policy.bits, policy.channels, 2, {}, 0.0F, 4},
          static_cast<std::uint64_t>(policy.bits) << 32 |
              static_cast<std::uint64_t>(policy.tokens) << 16 | 4U};
}

LOWRANKKV_NAMESPACE_END
