"""The list: which text becomes which, in what room, and the test that catches it.

None raises, changes a shape or makes a NaN: what is wrong is a number. A text that is no longer there exactly once
fails `tests/test_mutants.py`; plant another bug in the same formula then.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        file: from the root of the tree.
        old: the text that is right, exactly once in the file.
        new: what is planted instead.
        tests: the node ids that catch it.
        sentence: what is then wrong.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    sentence: str

    @property
    def room(self) -> str:
        """The part of the library: a folder or module of the package, or of `inference`."""
        parts = [part.removesuffix(".py") for part in self.file.split("/")[2:]]
        return "/".join(parts[:2]) if parts[0] == "inference" else parts[0]

    def planted(self, text: str) -> str:
        """The file's text with the bug in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"the bug {self.sentence!r} cannot be planted: {self.file} has {self.old!r} {count} times; "
                "take a text in tests/mutants/planted.py that is there once"
            )
        return text.replace(self.old, self.new)


def mutant(file: str, old: str, new: str, test: str, sentence: str) -> Mutant:
    """A bug in the package, caught by tests under `tests/`, separated by spaces."""
    return Mutant(
        f"src/dubito/{file}", old, new, tuple(f"tests/{each}" for each in test.split(" ")), sentence
    )


MUTANTS = (
    # -- the four that once survived -------------------------------------------------------------------------------
    mutant(
        "inference/deep_ensemble.py",
        "values[member - 1]",
        "values[member - 2]",
        "inference/test_inference_deep_ensemble.py::test_three_members_meet_their_own_noise",
        "members after the first are permuted, and meet another's noise",
    ),
    mutant(
        "node_factors/objective.py",
        "torch.cat([half, half * signs[-1]], axis)",
        "torch.cat([half, half], axis)",
        "inference/test_inference_noise.py::test_rows_halves_passes_and_components_are_uncorrelated",
        "both halves of a batch have the same noise",
    ),
    mutant(
        "node_factors/objective.py",
        "rows.stop - rows.start), signs[:-1]",
        "rows.stop - rows.start), torch.ones_like(signs[:-1])",
        "inference/test_inference_noise.py::test_rows_halves_passes_and_components_are_uncorrelated",
        "all components share their noise",
    ),
    # -- methods ---------------------------------------------------------------------------------------------------
    mutant(
        "inference/bali/layer.py",
        "return self.data + self.floor.shape[1] + 1",
        "return self.data + 2 * self.floor.shape[1] + 1",
        "inference/test_inference_bali_layer.py::test_pseudo_targets_are_those_of_the_paper",
        "the mode of the noise has twice the outputs in its denominator",
    ),
    mutant(
        "inference/bali/layer.py",
        "white.shape[1] * (1 - rate)",
        "white.shape[1]",
        "inference/test_inference_bali.py::test_a_mean_moves_by_equation_74_between_factorisations",
        "between factorisations a mean forgets too little",
    ),
    mutant(
        "inference/bali/choose.py",
        "self.rows[order[:count]] = order[count : 2 * count]",
        "self.rows[order[:count]] = order[:count]",
        "inference/test_inference_bali_choose.py::test_withheld_rows_do_not_train_until_they_are_released",
        "rows that judge have trained",
    ),
    mutant(
        "inference/batch_ensemble.py",
        "additive: ClassVar[bool] = False",
        "additive: ClassVar[bool] = True",
        "inference/test_inference_rank1.py::test_start",
        "members add their factors to the weights",
    ),
    mutant(
        "node_factors/components.py",
        "seed=start.seed",
        "seed=0",
        "inference/test_inference_rank1.py::test_components_sides_layers_and_seeds_start_apart",
        "every seed starts its factors alike",
    ),
    mutant(
        "inference/hmc/target.py",
        "return 0.5 * (weights / self.prior_std).square().sum() - fit",
        "return (weights / self.prior_std).square().sum() - fit",
        "contract/test_truth.py::test_draws_have_the_declared_mean_and_covariance[hmc]",
        "the prior counts twice",
    ),
    mutant(
        "inference/implicit/objective.py",
        "deviations.square().sum(0).sqrt() / len(means)",
        "deviations.square().mean(0).sqrt()",
        "inference/test_inference_implicit.py::test_divergences",
        "the deviation of the components' mean lacks 1/√K",
    ),
    mutant(
        "inference/k_tied.py",
        "factor_rate=0.5 if self.match_rates else 1.0",
        "factor_rate=1.0 if self.match_rates else 0.5",
        "inference/test_inference_k_tied.py::test_factors_learn_at_half_the_rate_so_that_log_std_moves_as_in_mean_field",
        "rates are matched where that is not asked for",
    ),
    mutant(
        "inference/laplace/method.py",
        '"prior_precision": float(self.prior_precision or',
        '"prior_precision": 2 * float(self.prior_precision or',
        "inference/test_inference_laplace.py::test_draws_have_variance_one_over_curvature_and_prior",
        "the prior counts twice",
    ),
    mutant(
        "inference/laplace/validation.py",
        "(means + errors <= margin)",
        "(means <= margin)",
        "inference/test_inference_laplace_defaults.py::test_losses_are_those_of_posteriors_fitted_one_by_one[reals-Diagonal()]",
        "the prior precision is chosen without the standard error of the loss",
    ),
    mutant(
        "inference/laplace/validation.py",
        "precision = self.prior_precision or self.posterior.prior_precisions[name]",
        "precision = 2 * (self.prior_precision or self.posterior.prior_precisions[name] / 2)",
        "inference/test_inference_laplace_defaults.py::test_losses_are_those_of_posteriors_fitted_one_by_one[reals-KFAC()]",
        "prior precisions are judged by predictions of twice as large ones",
    ),
    mutant(
        "inference/laplace/tuning.py",
        "precision * squared_norm(normal) + float",
        "0.5 * precision * squared_norm(normal) + float",
        "inference/test_inference_laplace_tuning.py::test_the_marginal_likelihood_is_that_of_the_dense_formula",
        "the marginal likelihood halves the prior's penalty",
    ),
    mutant(
        "inference/mc_dropout.py",
        "return normal_penalty(trainable(self.draft.network).values(), std)",
        "return 2 * normal_penalty(trainable(self.draft.network).values(), std)",
        "inference/test_inference_mc_dropout.py::test_the_prior_penalises_trainable_weights",
        "the prior counts twice",
    ),
    mutant(
        "inference/mean_field.py",
        "initial_raw_std(weights[name], self.initial_std, self.initial_spread, start.seed, name)",
        'initial_raw_std(weights[name], self.initial_std, self.initial_spread, start.seed, "weight")',
        "inference/test_inference_mean_field.py::test_layers_and_seeds_start_with_noise_of_their_own",
        "all layers start with the same noise on their standard deviations",
    ),
    mutant(
        "inference/natural_gradient/objective.py",
        '(group["num_data"] / group["kl_weight"]) ** 0.5',
        '(group["num_data"] * group["kl_weight"]) ** 0.5',
        "contract/test_truth.py::test_draws_have_the_declared_mean_and_covariance[noisy-kfac]",
        "a colder Noisy K-FAC is a warmer one",
    ),
    mutant(
        "inference/map.py",
        "normal_penalty(weights.values(), self.prior_std)",
        "normal_penalty(weights.values(), self.prior_std**2)",
        "inference/test_inference_map.py::test_ridge_regression",
        "the prior's variance stands for its standard deviation",
    ),
    mutant(
        "inference/rank1.py",
        "std = (rate / (1 - rate)) ** 0.5",
        "std = rate**0.5",
        "inference/test_inference_rank1.py::test_start",
        "deviations do not start at those of dropout",
    ),
    mutant(
        "inference/swag/swag.py",
        "averages.squares[key + name] / averages.count",
        "averages.squares[key + name] / (averages.count - 1)",
        "inference/test_inference_swag.py::test_the_samplers_linear_map_has_the_covariance",
        "variances are those of a sample",
    ),
    mutant(
        "inference/swag/averages.py",
        "self.squares[name] += before * after",
        "self.squares[name] += before * before",
        "inference/test_inference_swag.py::test_running_moments_are_those_of_two_passes",
        "Welford's update takes the deviation from the old mean twice",
    ),
    # -- what methods stand on -------------------------------------------------------------------------------------
    mutant(
        "curvature/kinds.py",
        "yield 1 / self.draws, output_gradient(likelihood, outputs, drawn)",
        "yield 1.0, output_gradient(likelihood, outputs, drawn)",
        "curvature/test_curvature_diagonal.py::test_drawn_labels_approach_the_exact_curvature",
        "several draws of labels add up instead of being averaged",
    ),
    mutant(
        "distributions/linalg.py",
        "signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0)",
        "signs = torch.where(triangle.diagonal() < 0, 1.0, 1.0)",
        "distributions/test_distributions_linalg.py::test_eigenvectors_do_not_depend_on_the_solver",
        "bases of eigenspaces have the signs that the solver gave them",
    ),
    mutant(
        "distributions/two_sided.py",
        "self.right[:, -1] if biased else None",
        "self.right[:, -2] if biased else None",
        "test_matrices.py::test_functions_of_few_rows_are_those_of_the_written_weights",
        "the noise of a bias meets the last input in functions of few rows",
    ),
    mutant(
        "distributions/inverse_wishart.py",
        "self._scale() / (self.dof + self.event_shape[0] + 1)",
        "self._scale() / (self.dof + self.event_shape[0] - 1)",
        "distributions/test_distributions_matrix_normal.py::test_the_inverse_wishart_is_scipys",
        "the mode of the inverse Wishart is off",
    ),
    mutant(
        "distributions/matrix_normal.py",
        "logs = logs + 2 * n * (log_diagonal(q.column_scale_tril) - log_diagonal(p.column_scale_tril))",
        "logs = logs + n * (log_diagonal(q.column_scale_tril) - log_diagonal(p.column_scale_tril))",
        "distributions/test_distributions_matrix_normal.py::test_divergence_of_matrix_normals_is_the_dense_one",
        "the divergence counts half of the columns' determinant",
    ),
    mutant(
        "node_factors/other_laws.py",
        "self.law(2 * mean, 2 * std)",
        "self.law(2 * mean, std)",
        "test_node_factors_laws.py::test_divergence_and_draws_against_monte_carlo",
        "the square of a log-Normal keeps its scale",
    ),
    mutant(
        "weight_normals/terms.py",
        "return torch.sub(std, std.reciprocal(), alpha=prior_variance).mul_(scale)",
        "return torch.sub(std, std.reciprocal(), alpha=0.5 * prior_variance).mul_(scale)",
        "weight_normals/test_weight_normals_terms.py::test_divergences",
        "the divergence's slope in σ is not that of the divergence",
    ),
    mutant(
        "layers/factors.py",
        "return (None, log(self.bound)) if self.positive else (-self.bound, self.bound)",
        "return (None, log(self.bound)) if self.positive else (None, self.bound)",
        "inference/test_inference_rank1.py::test_bounded_draws_stay_within_their_bound",
        "draws have no lower bound",
    ),
    mutant(
        "weight_normals/objective.py",
        "values = values * (spread * noise).exp()",
        "values = values * (1 + spread * noise).abs()",
        "inference/test_inference_mean_field.py::test_layers_and_seeds_start_with_noise_of_their_own",
        "standard deviations do not start log-Normal",
    ),
    mutant(
        "objective.py",
        "total = nll if none else nll + (kl_weight / self.num_data) * divergence",
        "total = nll if none else nll + (1 / self.num_data) * divergence",
        "inference/test_inference_mean_field.py::test_loss_and_gradients_are_those_of_the_reparameterised_draw",
        "the weight of the divergence is not heard",
    ),
    mutant(
        "optim/vogn.py",
        'state.pop("squares") * state.pop("rows")',
        'state.pop("squares") * state.pop("rows").sqrt()',
        "optim/test_optim_noisy.py::test_vogn_is_algorithm_4",
        "squares of rows' gradients lack √B",
    ),
    mutant(
        "optim/noisy.py",
        "self.move(p, -p.grad, group, told if counted(group) else 1)",
        "self.move(p, -p.grad, group, told if counted(group) and self.sums else 1)",
        "inference/test_inference_natural_gradient.py::test_standard_deviations_are_the_posteriors",
        "the square of a batch's mean gradient stands for the mean square of its rows'",
    ),
    mutant(
        "optim/vadam.py",
        'seen = self.fisher(p, group) if group["correct_start"] else squares',
        "seen = self.fisher(p, group)",
        "optim/test_optim_noisy.py::test_vadam_is_algorithm_3",
        "a start that is not 0 is corrected as if it were",
    ),
    mutant(
        "noise_check.py",
        "noisy, centre = (mean_nll(view, batch) for view in (posterior, posterior._view(0.0)))",
        "noisy, centre = (mean_nll(view, batch) for view in (posterior, posterior))",
        "test_noise_check.py::test_noise_that_drowns_a_trained_network_is_named_with_the_remedy",
        "noise is compared with itself, and never costs anything",
    ),
    mutant(
        "optim/noisy.py",
        'return group["kl_weight"] / (group["num_data"] * group["prior_std"] ** 2)',
        'return group["kl_weight"] / (group["num_data"] * group["prior_std"])',
        "optim/test_optim_noisy.py::test_noisy_adam_is_algorithm_2",
        "the prior's standard deviation stands for its variance",
    ),
    mutant(
        "priors.py",
        "for parameter in parameters]).sum() / (2 * prior_std**2)",
        "for parameter in parameters]).mean() / (2 * prior_std**2)",
        "test_priors.py::test_the_penalty_is_minus_the_log_density_up_to_its_constant",
        "the penalty is a mean over layers",
    ),
    # -- data, loops, predictions ----------------------------------------------------------------------------------
    mutant(
        "data/splits.py",
        "for _ in range(split):",
        "for _ in range(split + 1):",
        "data/test_data_splits.py::test_splits_follow_the_published_rule",
        "every split is the next one",
    ),
    mutant(
        "data/synthetic.py",
        "stream.normal(x**3, 3)",
        "stream.normal(x**3, 9)",
        "data/test_data_synthetic.py::test_sets_follow_the_papers",
        "the cubic's noise has its variance for a standard deviation",
    ),
    mutant(
        "diagnostics.py",
        "ratios = ((self.first + self.mean).square() / variance)[varied].double()",
        "ratios = (self.mean.square() / variance)[varied].double()",
        "test_diagnostics.py::test_along_a_run",
        "the signal lacks the first gradient",
    ),
    mutant(
        "evaluation.py",
        "prediction.interval(0.95)",
        "prediction.interval(0.9)",
        "test_posterior.py::test_evaluation_of_reals",
        "the coverage is that of another interval",
    ),
    mutant(
        "inputs.py",
        "return cls(first.dtype, first.device)",
        "return cls(torch.get_default_dtype(), first.device)",
        "test_inputs.py::test_the_place_of_a_module",
        "a network's dtype is not looked at",
    ),
    mutant(
        "likelihoods/categorical.py",
        "entropy(some_log_probs, axis + 1).sum(0)",
        "entropy(some_log_probs, axis + 1).mean(0) * len(outputs) ** 0.5",
        "test_prediction.py::test_draws_are_judged_together_or_one_by_one",
        "a stack of draws counts by its root in the aleatoric entropy",
    ),
    mutant(
        "likelihoods/gaussian.py",
        "noise[draw % self.num_components]",
        "noise[-1 - draw % self.num_components]",
        "test_likelihoods.py::test_noise_per_component",
        "draws use the noise of another component",
    ),
    mutant(
        "likelihoods/gaussian.py",
        "return log_prob - self.scale.log().expand(outputs.shape[1:]).sum()",
        "return log_prob - self.scale.log().sum()",
        "contract/test_standardised.py::test_positions_share_the_units_of_their_output",
        "the density of standardised targets counts one position of each output",
    ),
    mutant(
        "likelihoods/moments.py",
        "gap.square() * (count * rows / (count + rows))",
        "gap.square() * (rows / (count + rows))",
        "contract/test_standardised.py::test_moments_of_batches_are_those_of_the_whole",
        "means that differ between batches hardly count in the standard deviation",
    ),
    mutant(
        "inference/bali/stepper.py",
        "likelihood.standardised(batch.targets)",
        "likelihood.restored(batch.targets)",
        "contract/test_standardised.py::test_every_method_gives_the_same_posterior_in_other_units",
        "BALI's last layer regresses on targets in the wrong units",
    ),
    mutant(
        "data/readers.py",
        "labels.index(label)",
        "label % len(labels)",
        "data/test_data_tables.py::test_the_class_that_satimage_leaves_out_leaves_no_gap",
        "classes of a table that leaves numbers out are mixed up",
    ),
    mutant(
        "likelihoods/bernoulli.py",
        "root = (logits.sigmoid() * (-logits).sigmoid()).sqrt()",
        "root = logits.sigmoid() * (-logits).sigmoid()",
        "test_likelihoods.py::test_the_root_squares_to_the_hessian",
        "the root of the Hessian is the Hessian",
    ),
    mutant(
        "precision.py",
        '{"bf16": torch.bfloat16, "fp16": torch.float16}',
        '{"bf16": torch.float16, "fp16": torch.float16}',
        "test_precision.py::test_a_prediction_in_bf16_is_the_mean_over_passes_under_autocast",
        "passes in bf16 run in fp16",
    ),
    mutant(
        "fitting.py",
        "(checked_inputs(piece, options) for piece in cut(data, max_rows))",
        "(checked_inputs(piece, options).flip(0) for piece in cut(data, max_rows))",
        "test_predict_data.py::test_arrays_come_in_pieces",
        "rows of a piece come in reverse",
    ),
    mutant(
        "matrices.py",
        "zip(turned, noisy, self.generators, strict=True)",
        "zip(turned, noisy, reversed(self.generators), strict=True)",
        "test_matrices.py::test_functions_of_few_rows_are_those_of_the_written_weights",
        "rows of a pass over several draws meet the noise of other draws",
    ),
    mutant(
        "metrics/calibration.py",
        "(inner * size + num_bins - 1) // num_bins - 1",
        "inner * size // num_bins - 1",
        "metrics/test_metrics_calibration.py::test_adaptive_bins_differ_by_at_most_one_example",
        "limits of adaptive bins are rounded down",
    ),
    mutant(
        "metrics/selective.py",
        "(num_wrong.to(uncertainty.dtype) / size).repeat_interleave(size)",
        "(wrong[uncertainty.argsort()].to(uncertainty.dtype))",
        "metrics/test_metrics_selective.py::test_ties_give_the_mean_over_every_order",
        "ties are taken in the order they come",
    ),
    mutant(
        "models/initial.py",
        'nonlinearity="linear" if layer is layers[-1] else "relu"',
        'nonlinearity="relu"',
        "models/test_model_networks.py::test_weights_start_by_he",
        "the last layer starts √2 too large",
    ),
    mutant(
        "fitting.py",
        "known = num_data or source.num_data",
        "known = source.num_data or num_data",
        "inference/test_inference_map.py::test_the_prior_is_shared_out_over_the_rows_that_are_given",
        "the number of rows that is given is not heard",
    ),
    mutant(
        "method.py",
        'given |= {"seed": seed, "progress": progress}',
        'given |= {"seed": 0, "progress": progress}',
        "inference/test_inference_build.py::test_a_seed_starts_and_trains_as_fit_does[map]",
        "every fit starts from seed 0",
    ),
    mutant(
        "protocol/run.py",
        "steps.warm else None",
        "False else None",
        "test_protocol.py::test_a_warm_start_begins_at_the_map_fit",
        "no method starts from the MAP fit",
    ),
    mutant(
        "protocol/choices.py",
        "scale = preferred_scale(losses, NEGLIGIBLE)",
        "scale = 1.0",
        "test_protocol.py::test_a_posterior_that_is_far_too_wide_is_scaled_down",
        "validation rows choose no scale",
    ),
    mutant(
        "processes.py",
        "return rows * rank // sharing, rows * min(rank + 1, sharing) // sharing",
        "return rows * rank // sharing, rows * min(rank + 1, sharing) // sharing - (rank == 1)",
        "training/test_training_processes.py::test_shares_are_the_rows_and_none_is_of_one_row",
        "the second process leaves out a row",
    ),
    mutant(
        "networks.py",
        "{name: False for name, module in net.named_modules() if not module.training}",
        "{}",
        "test_networks.py::test_a_training_lease_keeps_frozen_parts_and_leaves_the_network_in_evaluation_mode",
        "modules in evaluation mode are trained",
    ),
    mutant(
        "posterior/base.py",
        'seeds.generator(seed, "draw", index, device',
        'seeds.generator(seed, "draw", index // 2, device',
        "test_posterior.py::test_samples_are_the_network_run_with_each_draw",
        "two draws in a row are the same",
    ),
    mutant(
        "prediction/formulas.py",
        "return per_row(stds.log()).exp()",
        "return per_row(stds)",
        "compare/test_compare_predict.py::test_rows_are_unlike_training_in_whatever_units",
        "the spread of a row is that of its largest output",
    ),
    mutant(
        "prediction/real.py",
        "self.means * scale + shift, self.variances * scale**2",
        "self.means * scale + shift, self.variances * scale",
        "test_prediction.py::test_rescaling_is_a_change_of_variables",
        "variances take new units like means",
    ),
    mutant(
        "prediction/real.py",
        "return self.epistemic.sqrt()",
        "return self.epistemic",
        "test_prediction.py::test_the_two_parts_of_uncertainty_are_shown_in_the_targets_units",
        "tables show a variance beside standard deviations",
    ),
    mutant(
        "compare/evidence_real.py",
        "short(epistemic[:, place], 3)",
        "short(epistemic.mean(1), 3)",
        "compare/test_compare.py::test_parts_of_uncertainty_are_stored_in_each_targets_units",
        "targets of other units share one number",
    ),
    mutant(
        "compare/replicates.py",
        "which = torch.randint(len(values), size, generator=stream)",
        "which = torch.arange(len(values)).expand(size)",
        "compare/test_compare_splits.py::test_over_splits_the_spread_of_splits_counts",
        "splits are not drawn, so that their spread does not count",
    ),
    mutant(
        "compare/verdict.py",
        "if areas[first].lower <= 0.5:",
        "if areas[first].value <= 0.5:",
        "compare/test_compare_verdict.py::test_an_area_at_chance_is_not_praised",
        "an AUROC that chance explains is praised",
    ),
    mutant(
        "training/account.py",
        "self.before = max(self.before, spent)",
        "self.before = self.before",
        "training/test_training_account.py::test_what_was_spent_before_an_interruption_counts",
        "what was spent before an interruption is given again",
    ),
    mutant(
        "seeds.py",
        "first = start - blocks.start * self.block",
        "first = (start - blocks.start * self.block) // 2",
        "test_seeds.py::test_a_rows_noise_does_not_depend_on_its_batch",
        "a row's noise depends on its batch",
    ),
    mutant(
        "sources.py",
        "rows - starts[-1] == 1 and batch_size > 1",
        "rows - starts[-1] <= 2 and batch_size > 2",
        "test_sources.py::test_split_takes_every_row_once_and_leaves_none_alone",
        "two last rows are no batch of their own",
    ),
    mutant(
        "storage/files.py",
        "for name in sorted(tensors):",
        "for name in sorted(tensors)[:1]:",
        "storage/test_storage_files.py::test_the_metadata_are_one_json_key",
        "the checksum reads one tensor",
    ),
    mutant(
        "posterior/base.py",
        "beside = sum(group[name].numel() for group in groups if name in group)",
        "beside = max((group[name].numel() for group in groups if name in group), default=0)",
        "contract/test_contract.py::test_the_summary_names_every_parameter",
        "a parameter's numbers leave out some of what is kept",
    ),
    mutant(
        "training/schedules.py",
        "sum(progress >= share for share in self.at)",
        "sum(progress > share for share in self.at)",
        "training/test_training_settings.py::test_schedules_are_their_formulas",
        "a milestone acts one step late",
    ),
    mutant(
        "training/settings.py",
        "whole = step // size * size",
        "whole = step",
        "training/test_training_settings.py::test_the_weight_of_the_divergence",
        "the divergence's weight moves at every step",
    ),
    # -- around the library ----------------------------------------------------------------------------------------
    mutant(
        "active/acquisition.py",
        "return second - first",
        "return first - second",
        "active/test_active.py::test_class_scores_follow_their_definition",
        "the surest rows are asked for",
    ),
    mutant(
        "active/curves.py",
        "return fmean(self.values(metric)[1:])",
        "return fmean(self.values(metric))",
        "active/test_active.py::test_a_run_step_by_step",
        "the start, the same for all, counts in a run's average",
    ),
    mutant(
        "calibration/scale.py",
        "if 0 in losses and all(",
        "if 0 in losses and any(",
        "calibration/test_calibration_scale.py::test_zero_must_win_against_every_other_scale",
        "no uncertainty is taken where it beats a single scale",
    ),
    mutant(
        "node_factors/posterior.py",
        "state = [self.scale, *(",
        "state = [1.0, *(",
        "contract/test_scaled.py::test_threads_may_ask_for_both",
        "a scaled view of factors draws with the standard deviations that another scale left",
    ),
    mutant(
        "inference/laplace/linearised.py",
        "values = values * scale**2",
        "values = values * scale",
        "contract/test_scaled.py::test_closed_forms_have_the_covariance_times_the_square",
        "linearised predictions have standard deviations times the root of the scale",
    ),
    mutant(
        "calibration/conformal.py",
        "scores.sort(dim=0).values[place - 1]",
        "scores.sort(dim=0).values[place - 2]",
        "calibration/test_calibration_conformal.py::test_sets_cover_what_they_promise",
        "the threshold is one score too low",
    ),
    mutant(
        "calibration/abstention.py",
        "(n - i) * math.log1p(-p)",
        "(n - i - 1) * math.log1p(-p)",
        "calibration/test_calibration_conformal.py::test_the_bound_is_that_of_clopper_and_pearson",
        "the binomial's chance lacks a factor",
    ),
    mutant(
        "cli/predict.py",
        "level=options.level",
        "level=0.95",
        "compare/test_compare_predict.py::test_the_command_hears_level_samples_and_seed",
        "the level asked for is not heard",
    ),
    mutant(
        "compare/evidence.py",
        "foreign = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()",
        "foreign = torch.cat([torch.ones(len(inside)), torch.zeros(len(outside))]).bool()",
        "compare/test_compare.py::test_results_posteriors_and_ranking",
        "known rows count as the unknown ones",
    ),
    mutant(
        "plot/doubt.py",
        "share = torch.full_like(rows, 1 / len(rows)).tolist()",
        "share = torch.full_like(rows, 1 / (len(rows) + 1)).tolist()",
        "plot/test_plot_predictions.py::test_histograms_hold_all_rows",
        "shares of rows do not add up to 1",
    ),
    mutant(
        "report/svg.py",
        "bottom - share_y * (bottom - top)",
        "top + share_y * (bottom - top)",
        "report/test_report_page.py::test_marks_lie_where_their_numbers_say",
        "charts stand on their heads",
    ),
    mutant(
        "shifts/noise.py",
        "torch.where(draws < share / 2, 0.0,",
        "torch.where(draws < share / 3, 0.0,",
        "shifts/test_shifts_corruptions.py::test_noise_has_its_moments",
        "there is twice as much salt as pepper",
    ),
    mutant(
        "shifts/blur.py",
        "return total / (len(factors) + 1)",
        "return total / len(factors)",
        "shifts/test_shifts_corruptions.py::test_blur_keeps_the_mean_and_lowers_the_contrast",
        "zoomed images are too bright",
    ),
    # -- linearised predictions --------------------------------------------------------------------------------------
    mutant(
        "inference/laplace/covariance.py",
        "weight @ vectors[some].square().mT",
        "weight @ vectors[:, some].square()",
        "inference/test_inference_laplace_outputs.py::test_a_last_layer_needs_no_backward_pass[mlp]",
        "a last layer's variances come from columns of U_G in place of its rows",
    ),
    mutant(
        "inference/laplace/covariance.py",
        "(total + contracted(y.flatten(2), None, contraction))",
        "(total + 0 * contracted(y.flatten(2), None, contraction))",
        "inference/test_inference_laplace_outputs.py::test_sums_of_squares_are_the_same[congruence-mlp]",
        "variances that are taken again lack |y|²",
    ),
    mutant(
        "inference/laplace/covariance.py",
        "(sets - sets.mean(2, keepdim=True)).square_()",
        "(sets - sets.mean(1, keepdim=True)).square_()",
        "inference/test_inference_laplace_classes.py::test_last_layers_of_every_kind",
        "logits are centred over positions in place of classes",
    ),
    mutant(
        "inference/laplace/shares.py",
        "centred = centred + before * len(some) / seen * variance(change)",
        "centred = centred + len(some) / seen * variance(change)",
        "inference/test_inference_laplace_classes.py::test_last_layers_of_every_kind",
        "groups of classes are merged with a weight that forgets how many came before",
    ),
    mutant(
        "prediction/formulas.py",
        "self.squares / self.count - (self.sums / self.count).square()",
        "self.squares / self.count",
        "test_prediction.py::test_the_variance_of_large_logits_has_its_digits",
        "the variance of logits is taken around the first draw",
    ),
    mutant(
        "inference/laplace/covariance.py",
        "(weight.unsqueeze(2) * g.unsqueeze(1)) @ g.mT",
        "(weight.unsqueeze(2) * g.unsqueeze(0)) @ g.mT",
        "inference/test_inference_laplace_joint.py::test_mean_and_covariance_are_those_of_dense_jacobians[KFAC()-mlp]",
        "covariances between two rows are made of the gradients of one",
    ),
    mutant(
        "inference/laplace/output_gradients.py",
        "and outputs._version == last.version",
        "and outputs._version >= last.version",
        "inference/test_inference_laplace_outputs.py::test_last_layers_of_every_kind[KFAC()-in-place]",
        "what a network does in place to its last layer's answers is taken for nothing",
    ),
    # -- reads of a device ---------------------------------------------------------------------------------------
    mutant(
        "devices.py",
        'if numbers[0].device.type == "cuda":',
        'if numbers[0].device.type == "none":',
        "device/test_device_reads.py::test_steps_read_nothing[map]",
        "the terms of every step's loss wait for the device",
    ),
    mutant(
        "training/loop.py",
        "None if norm is None else HostCopy((norm,))",
        "None if norm is None else HostCopy((torch.tensor(float(norm)),))",
        "device/test_device_reads.py::test_steps_read_nothing[map]",
        "the norm of a gradient waits for the device",
    ),
    mutant(
        "node_factors/components.py",
        "asked = light and bool(stds) and on_host(next(iter(stds.values())))",
        "asked = light and bool(stds)",
        "device/test_device_reads.py::test_steps_read_nothing[rank1]",
        "a device is asked at every step whether draws can reach their bound",
    ),
    mutant(
        "node_factors/loop.py",
        "unit = on_host(g) and bool(g == 1)",
        "unit = bool(g == 1)",
        "device/test_device_reads.py::test_steps_read_nothing[rank1-loop]",
        "a device is asked at every step whether the loss's gradient is 1",
    ),
    mutant(
        "seeds.py",
        "offset = generator.get_offset()",
        "offset = int(torch.randint(2**30, (), generator=generator, device=generator.device))",
        "device/test_device_reads.py::test_steps_read_nothing[local]",
        "seeds of streams per row are read from the device",
    ),
    mutant(
        "layers/record.py",
        "_Anchor.apply(self.anchor, output, caught)",
        "_Anchor.apply(self.anchor.to(output), output, caught)",
        "device/test_device_reads.py::test_steps_read_nothing[laplace-kfac]",
        "every recorded call copies a number to the device",
    ),
    mutant(
        "inputs.py",
        "if not (anywhere or on_host(tensor)):",
        "if not (anywhere or True):",
        "device/test_device_reads.py::test_predictions_read_nothing[device-sampled-map]",
        "every prediction asks the device whether its inputs are finite",
    ),
    mutant(
        "inputs.py",
        "return tensor.where(rows.reshape(-1, *[1] * (tensor.ndim - 1)), math.nan)",
        "return tensor",
        "device/test_device_reads.py::test_rows_of_a_device_that_are_not_finite_are_answered_by_nan",
        "rows of a device that are not finite are answered in silence",
    ),
    mutant(
        "prediction/formulas.py",
        "(on_host(targets) and (targets.min() < 0 or targets.max() >= classes))",
        "(targets.min() < 0 or targets.max() >= classes)",
        "device/test_device_reads.py::test_densities_of_targets_read_nothing",
        "every density asks the device whether its labels exist",
    ),
    mutant(
        "sources.py",
        "torch.cat([*groups]).to(targets.device).split(sizes)",
        "(group.to(targets.device) for group in groups)",
        "device/test_device_reads.py::test_steps_read_nothing[map]",
        "row numbers are copied to the device step by step",
    ),
    mutant(
        "inference/implicit/objective.py",
        "if self._count is None or self._count[1] != stored._version:",
        "if self._count is None or True:",
        "device/test_device_reads.py::test_steps_read_nothing[implicit]",
        "the rows seen are read from the device at every step",
    ),
    mutant(
        "selfcheck.py",
        "if not value <= most:",
        "if value > 1e6 * most:",
        "test_selfcheck.py::test_what_is_wrong_is_named",
        "a device that answers otherwise is called right",
    ),
    mutant(
        "devices.py",
        'non_blocking=device.type == "cuda" and on_host(tensor)',
        "non_blocking=False",
        "device/test_device_reads.py::test_steps_read_nothing[loader]",
        "every batch that is copied to the device is waited for",
    ),
    # -- draws made once ---------------------------------------------------------------------------------------------
    mutant(
        "draws/linearised.py",
        "return outputs + change\n",
        "return outputs + 0.5 * change\n",
        "draws/test_draws_linearised.py::test_draws_are_the_tangents_of_the_network",
        "a linearised draw moves half as far as its weights do",
    ),
    mutant(
        "draws/base.py",
        'path = "network", self.facts["first"] + index',
        'path = "network", self.facts["first"]',
        "draws/test_draws_sampled.py::test_every_network_predicts_what_its_draws_do_one_by_one",
        "all draws share the noise of the network's own",
    ),
    mutant(
        "training/members.py",
        "factors.reshape(-1, *[1] * (gradient.ndim - 1))",
        "factors.min()",
        "inference/test_inference_deep_ensemble_beside.py::test_optimisers_treat_every_member_by_itself",
        "one member's gradient clips all members",
    ),
    mutant(
        "training/members.py",
        "k: v[number] if _per_weight(k, v)",
        "k: v[0] if _per_weight(k, v)",
        "inference/test_inference_deep_ensemble_beside.py::test_an_interrupted_ensemble_goes_on_from_its_members_checkpoints",
        "all members keep the optimiser's state of the first",
    ),
    mutant(
        "draws/module.py",
        "sign=sign, steps=steps) for sign in (1, -1)",
        "sign=sign, steps=steps) for sign in (-1, 1)",
        "draws/test_draws_module.py::test_it_says_what_the_prediction_says",
        "the module's interval is turned around",
    ),
    # -- rows beside the methods, and the search of their settings ---------------------------------------------------
    mutant(
        "compare/baselines.py",
        "errors.abs() / std",
        "errors / std",
        "compare/test_compare_baselines.py::test_conformal_intervals_cover_what_they_promise_where_the_gaussian_does_not",
        "errors below the mean do not widen a conformal interval",
    ),
    mutant(
        "compare/baselines.py",
        "int(np.argmax(stopped.validation_score_))",
        "int(stopped.n_iter_)",
        "compare/test_compare_baselines.py::test_boosting_has_as_many_trees_as_validation_rows_like_best",
        "boosting keeps the trees that did not help validation rows",
    ),
    mutant(
        "compare/tune.py",
        '"tune", name, number)',
        '"tune", name)',
        "compare/test_compare_tune.py::test_the_best_of_a_made_up_loss_is_found",
        "all trials that are drawn from the whole space are the same one",
    ),
    mutant(
        "compare/tune.py",
        "first - first % BATCH + BATCH",
        "len(trials) + BATCH",
        "compare/test_compare_tune.py::test_an_interrupted_search_makes_the_same_trials",
        "an interrupted search asks for trials before those of the batch are told",
    ),
    # -- other people's networks and tools ---------------------------------------------------------------------------
    mutant(
        "networks.py",
        "rule, parts = None, [module.base_layer]",
        "rule, parts = None, module.children()",
        "inference/test_inference_ensembles_of_others.py::test_members_with_adapters_start_with_b_at_zero",
        "adapters of a member start with B drawn like any dense layer",
    ),
    mutant(
        "inference/deep_ensemble.py",
        "point = PointPosterior(member, built, method=MAP(), trainable=())",
        "point = PointPosterior(first, built, method=MAP(), trainable=())",
        "inference/test_inference_ensembles_of_others.py::test_noise_comes_from_each_members_residuals",
        "all members have the noise of the first",
    ),
    mutant(
        "integrations/sklearn.py",
        'seeds.generator(seed, "noise", index',
        'seeds.generator(seed, "noise", 0',
        "integrations/test_integrations_sklearn.py::test_draws_are_functions_with_noise_of_their_own",
        "all functions of sample_y share their noise",
    ),
    mutant(
        "integrations/sklearn.py",
        "spare[np.unique(targets[order], return_index=True)[1]] = False",
        "spare[np.unique(targets, return_index=True)[1]] = False",
        "integrations/test_integrations_sklearn.py::test_classes_may_be_words_and_rare",
        "a class of one row may be held out of training",
    ),
)
