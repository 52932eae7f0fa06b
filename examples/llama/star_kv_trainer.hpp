// SPDX-License-Identifier: Apache-2.0
// Trains STAR-KV's ranks on a text: a student whose weights of keys and values are factorised
// learns to give the teacher's next-token distributions (lowrankkv/train/star_kv_training.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "lowrankkv/train/star_kv_training.hpp"
#include "model.hpp"

namespace llama {

/// How a student is trained. Where the paper (STAR-KV A.3) is silent, it says so.
struct TrainOptions {
  lowrankkv::train::StarKvOptions star;
  std::int64_t window = 512;     ///< tokens of a window; silent
  int batch = 4;                 ///< windows a step; silent
  double rate = 2e-5;            ///< AdamW's learning rate of the factors
  double threshold_rate = 1e-2;  ///< of the thresholds, without decay
  double weight_decay = 0.0;     ///< of the factors; silent
  std::int64_t warmup = 0;       ///< steps in which both rates grow to what they are; silent
  /// The factors' rate falls to this share of it along a cosine over all steps; silent.
  double last_rate = 0.1;
  double clip = 1.0;  ///< the largest norm of a step's gradient; 0: any; silent
  std::uint64_t seed = 1;
};

/// What a step of training says.
struct TrainStep {
  std::int64_t step = 0;    ///< counted from 1
  double divergence = 0.0;  ///< KL(teacher || student), the mean over the batch's tokens, in nats
  double objective = 0.0;   ///< what the phase minimises (STAR-KV eq. 5)
  double gradient_norm = 0.0;                 ///< before it was clipped
  double kept_keys = 1.0, kept_values = 1.0;  ///< shares of the ranks, after the step
};

/// Student and optimiser. What a step does depends on the text, the options and the step alone, not
/// on the number of threads.
class StarKvTrainer {
 public:
  /// Decomposes the student's weights, which are the teacher's.
  /// @param teacher, student  the same model twice; both outlive the trainer. The student's
  /// weights of keys and values change
  /// @param tokens  the text. A window is any part of it
  /// Throws std::runtime_error if heads have norms of their own, or the text is shorter than a
  /// window; lowrankkv::ValueError for options out of range.
  StarKvTrainer(const Model& teacher, Model& student, std::vector<std::int32_t> tokens,
                const TrainOptions& options);

  /// The gradients of the objective at the next step's batch, one a layer, empty where a layer is
  /// protected. Fills in divergence, objective and step.
  std::vector<lowrankkv::train::StarKvLayer> gradients(TrainStep& step);
  /// One step. Throws lowrankkv::StateError if training is finished, lowrankkv::ValueError if it
  /// leads to numbers that are not finite; the training and the optimiser have not changed then.
  TrainStep step();
  bool finished() const {
    return training_.progress().phase == lowrankkv::train::StarKvPhase::finished;
  }
  const lowrankkv::train::StarKvTraining& training() const { return training_; }

  /// The state as a file that is not written yet: that of StarKvTraining (star_kv_state.hpp), with
  /// the optimiser's moments `optimiser.first.i`, `optimiser.second.i` of layer i, f64, and
  /// metadata `train.*`, which say what the run is of.
  lowrankkv::io::SafetensorsWriter written() const;
  /// Goes on where a file of the same run ended. Throws lowrankkv::ValueError, naming both values,
  /// if it is of another run, FormatError or ShapeError if it is none; nothing has changed then.
  void restore(const lowrankkv::io::Safetensors& file);

 private:
  using Layer = lowrankkv::train::StarKvLayer;
  /// AdamW's moments of a layer's numbers, in the order of flat().
  struct Moments {
    std::vector<double> first, second;
  };
  std::vector<std::int32_t> window(int index) const;
  std::map<std::string, std::string> job() const;
  /// The optimiser's step of a layer. @param scale  of the gradient, by clipping
  Layer change(int layer, const Layer& gradient, double scale, Moments& moments) const;

  const Model& teacher_;
  Model& student_;
  std::vector<std::int32_t> tokens_;
  TrainOptions options_;
  lowrankkv::train::StarKvTraining training_;
  std::vector<Moments> moments_;
  std::map<std::string, std::string> job_;  // what the run is of, by name
};

/// The model's weights of keys and values become those that a training file truncates to, in all
/// layers that are not protected. Returns the maps of their caches, of pre-RoPE keys and joint
/// values: protected layers have all channels. Throws as read_star_kv(), and lowrankkv::ValueError
/// if the file says that it is of another model; nothing has changed then.
std::vector<lowrankkv::LayerBasis> use_trained_weights(const std::string& path, Model& model);

}  // namespace llama
