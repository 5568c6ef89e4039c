//! Inheritance: fields that a route leaves unset come from its group, then from the defaults.

use std::{num::NonZeroU32, time::Duration};

use axum::http::{Method, StatusCode};
use lock_runtime::{ErrorClass, LockSpec};
use lock_tower::{HoldUntil, LockPolicies, Policy};
use proptest::{option::weighted, prelude::*};

/// The fields of a table. `None` is unset.
#[derive(Clone, Debug, Default)]
struct Said {
    lease: Option<u64>,
    /// `Some(None)` is `no_wait`.
    wait: Option<Option<u64>>,
    sharing: Option<Sharing>,
    reentrant: Option<bool>,
    strict_order: Option<bool>,
    renew: Option<bool>,
    min_hold: Option<u64>,
    max_hold: Option<u64>,
    max_waiters: Option<usize>,
    hold: Option<HoldUntil>,
    retry_after: Option<u64>,
    fail_open: Option<bool>,
    statuses: [Option<u16>; ROWS.len()],
}

#[derive(Clone, Copy, Debug)]
enum Sharing {
    Mode(&'static str),
    Permits(NonZeroU32),
}

const ROWS: [(&str, ErrorClass); 6] = [
    ("busy", ErrorClass::Busy),
    ("overloaded", ErrorClass::Overloaded),
    ("unavailable", ErrorClass::Unavailable),
    ("lost", ErrorClass::Lost),
    ("bad_request", ErrorClass::BadRequest),
    ("internal", ErrorClass::Internal),
];

fn said() -> impl Strategy<Value = Said> {
    let sharing = prop_oneof![
        prop::sample::select(vec!["shared", "exclusive"]).prop_map(Sharing::Mode),
        (1..5_u32).prop_map(|permits| Sharing::Permits(NonZeroU32::new(permits).unwrap())),
    ];
    let hold = prop::sample::select(vec![HoldUntil::Response, HoldUntil::Body]);
    let times = (
        weighted(0.4, 1..100_u64),
        weighted(0.4, weighted(0.6, 0..100_u64)),
        // `min_hold` is at most `max_hold`, whichever tables they come from.
        weighted(0.4, 0..100_u64),
        weighted(0.4, 100..1000_u64),
        weighted(0.4, 0..100_u64),
    );
    let flags = (
        weighted(0.4, any::<bool>()),
        weighted(0.4, any::<bool>()),
        weighted(0.4, any::<bool>()),
        weighted(0.4, any::<bool>()),
    );
    let rest = (
        weighted(0.4, sharing),
        weighted(0.4, 0..100_usize),
        weighted(0.4, hold),
        prop::array::uniform6(weighted(0.2, 400..600_u16)),
    );
    (times, flags, rest).prop_map(|(times, flags, rest)| {
        let (lease, wait, min_hold, max_hold, retry_after) = times;
        let (reentrant, strict_order, renew, fail_open) = flags;
        let (sharing, max_waiters, hold, statuses) = rest;
        Said {
            lease,
            wait,
            sharing,
            reentrant,
            strict_order,
            renew,
            min_hold,
            max_hold,
            max_waiters,
            hold,
            retry_after,
            fail_open,
            statuses,
        }
    })
}

impl Said {
    fn written(&self) -> String {
        let seconds =
            |field: &str, said: Option<u64>| said.map(|said| format!("{field} = \"{said}s\"\n"));
        let flag = |field: &str, said: Option<bool>| said.map(|said| format!("{field} = {said}\n"));
        let wait = match self.wait {
            Some(None) => Some("no_wait = true\n".to_owned()),
            Some(wait) => seconds("wait", wait),
            None => None,
        };
        let statuses = ROWS.iter().zip(self.statuses);
        let statuses: Vec<_> = statuses
            .filter_map(|((row, _), said)| said.map(|status| format!("{row} = {status}")))
            .collect();
        let lines = [
            seconds("lease", self.lease),
            wait,
            self.sharing.map(|sharing| match sharing {
                Sharing::Mode(mode) => format!("mode = {mode:?}\n"),
                Sharing::Permits(permits) => format!("permits = {permits}\n"),
            }),
            flag("reentrant", self.reentrant),
            flag("strict_order", self.strict_order),
            flag("renew", self.renew),
            seconds("min_hold", self.min_hold),
            seconds("max_hold", self.max_hold),
            self.max_waiters
                .map(|most| format!("max_waiters = {most}\n")),
            self.hold.map(|hold| {
                format!(
                    "hold_until = {:?}\n",
                    if hold == HoldUntil::Body {
                        "body"
                    } else {
                        "response"
                    }
                )
            }),
            seconds("retry_after", self.retry_after),
            flag("fail_open", self.fail_open),
            (!statuses.is_empty()).then(|| format!("status = {{ {} }}\n", statuses.join(", "))),
        ];
        lines.into_iter().flatten().collect()
    }
}

/// The expected policy, built with the setters. The first table that sets a field applies.
fn policy(name: &str, all: &[&Said]) -> Policy {
    fn first<T>(all: &[&Said], field: impl Fn(&Said) -> Option<T>) -> Option<T> {
        all.iter().find_map(|said| field(said))
    }
    let seconds = |field: fn(&Said) -> Option<u64>| first(all, field).map(Duration::from_secs);
    let mut spec = match first(all, |said| said.sharing) {
        Some(Sharing::Mode("shared")) => LockSpec::shared(),
        Some(Sharing::Permits(permits)) => LockSpec::permits(permits),
        Some(Sharing::Mode(_)) | None => LockSpec::exclusive(),
    };
    if let Some(lease) = seconds(|said| said.lease) {
        spec = spec.lease(lease);
    }
    spec = match first(all, |said| said.wait) {
        Some(None) => spec.no_wait(),
        Some(Some(wait)) => spec.wait(Duration::from_secs(wait)),
        None => spec.wait(Duration::from_secs(2)),
    };
    if let Some(reentrant) = first(all, |said| said.reentrant) {
        spec = if reentrant {
            spec.reentrant()
        } else {
            spec.no_reentrant()
        };
    }
    if let Some(strict) = first(all, |said| said.strict_order) {
        spec = if strict {
            spec.strict_order()
        } else {
            spec.no_strict_order()
        };
    }
    if let Some(renew) = first(all, |said| said.renew) {
        spec = if renew { spec.renew() } else { spec.no_renew() };
    }
    if let Some(min_hold) = seconds(|said| said.min_hold) {
        spec = spec.min_hold(min_hold);
    }
    if let Some(max_hold) = seconds(|said| said.max_hold) {
        spec = spec.max_hold(max_hold);
    }
    if let Some(most) = first(all, |said| said.max_waiters) {
        spec = spec.max_waiters(most);
    }
    let mut policy = Policy::new(name.to_owned()).with_spec(spec);
    if let Some(hold) = first(all, |said| said.hold) {
        policy = policy.hold_until(hold);
    }
    if let Some(after) = seconds(|said| said.retry_after) {
        policy = policy.retry_after(after);
    }
    if first(all, |said| said.fail_open) == Some(true) {
        policy = policy.fail_open();
    }
    // Each status is inherited on its own.
    for (index, (_, answer)) in ROWS.into_iter().enumerate() {
        if let Some(status) = first(all, |said| said.statuses[index]) {
            policy = policy.status(answer, StatusCode::from_u16(status).unwrap());
        }
    }
    policy
}

proptest! {
    #[test]
    fn policy_file_routes_inherit_from_groups_then_from_defaults(
        defaults in said(),
        groups in proptest::collection::vec(said(), 0..3),
        routes in proptest::collection::vec((said(), 0..4_usize), 1..6),
    ) {
        let mut text = format!("[defaults]\nkey = '{{header.x}}'\n{}", defaults.written());
        for (number, group) in groups.iter().enumerate() {
            text += &format!("[groups.g{number}]\n{}", group.written());
        }
        for (number, (route, group)) in routes.iter().enumerate() {
            text += &format!("[routes.'GET /{number}']\n{}", route.written());
            if *group < groups.len() {
                text += &format!("group = 'g{group}'\n");
            }
        }
        let policies = LockPolicies::from_toml_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        for (number, (route, group)) in routes.iter().enumerate() {
            let found = policies.find(&Method::GET, &format!("/{number}")).unwrap();
            let inherited: Vec<_> = groups.get(*group).into_iter().chain([&defaults]).collect();
            let expected = policy(&format!("GET /{number}"), &[&[route][..], &inherited].concat());
            prop_assert_eq!(found.spec(), expected.spec(), "{}", text);
            prop_assert_eq!(&*found, &expected, "{}", text);
        }
    }
}
