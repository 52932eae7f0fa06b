// SPDX-License-Identifier: Apache-2.0
// A bounded sample of a stream, and one that goes on where another stopped.
#include "lowrankkv/calibrate/row_sample.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

namespace row_sample_tests {

using namespace lowrankkv;
using calibrate::RowSample;

TEST_CASE("a sample that goes on from its rows and their number is that of the whole stream") {
  constexpr int kDim = 3;
  std::vector<float> rows(200 * kDim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  for (const std::int64_t capacity : {1, 2, 5, 8, 300}) {
    RowSample whole(kDim, capacity);
    whole.add({rows.data(), 200, kDim});
    CHECK(whole.size() <= capacity);
    for (std::int64_t stop = 0; stop <= 200; ++stop) {
      CAPTURE(capacity);
      CAPTURE(stop);
      RowSample first(kDim, capacity);
      first.add({rows.data(), stop, kDim});
      RowSample second(kDim, capacity, first.values(), first.seen());
      second.add({rows.data() + stop * kDim, 200 - stop, kDim});
      CHECK(second.values() == whole.values());
      CHECK(second.seen() == 200);
    }
  }
  CHECK_THROWS_WITH_AS(RowSample(kDim, 8, std::vector<float>(9), 5),
                       "row sample: 9 numbers of rows, 15 expected of 5 rows of 3", ShapeError);
}

}  // namespace row_sample_tests
