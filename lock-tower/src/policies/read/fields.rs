//! The fields of `[defaults]`, groups and routes.

use std::num::NonZeroU32;

use http::StatusCode;
use lock_runtime::{LockSpec, web::ErrorClass};
use toml::{Spanned, de::DeTable};

use super::{
    Reader,
    values::{Value, at},
};
use crate::{
    policies::settings::{Settings, Sharing, Waiting},
    protocol::HoldUntil,
};

/// The fields that only routes have.
pub(super) const OF_ROUTES: [&str; 3] = ["name", "group", "skip"];
/// In the order of the documentation.
pub(super) const FIELDS: [&str; 17] = [
    "key",
    "global",
    "lease",
    "wait",
    "no_wait",
    "mode",
    "permits",
    "reentrant",
    "min_hold",
    "max_hold",
    "no_renew",
    "strict_order",
    "max_waiters",
    "hold_until",
    "retry_after",
    "fail_open",
    "status",
];
/// Names of the same options in other libraries and in the attribute.
const ALIASES: [(&str, &str); 11] = [
    ("ttl", "lease"),
    ("expiry", "lease"),
    ("timeout", "wait"),
    ("acquire_timeout", "wait"),
    ("read", "mode"),
    ("write", "mode"),
    ("semaphore", "permits"),
    ("lock_at_most_for", "max_hold"),
    ("lock_at_least_for", "min_hold"),
    ("fair", "strict_order"),
    ("template", "key"),
];
/// The rows of the table of refusals.
pub(in crate::policies) const ROWS: [(&str, ErrorClass); 6] = [
    ("busy", ErrorClass::Busy),
    ("overloaded", ErrorClass::Overloaded),
    ("unavailable", ErrorClass::Unavailable),
    ("lost", ErrorClass::Lost),
    ("bad_request", ErrorClass::BadRequest),
    ("internal", ErrorClass::Internal),
];

impl Reader<'_> {
    /// Parses the fields of a table. `own` lists further fields of this table that are parsed
    /// elsewhere.
    pub(super) fn settings<'d>(&mut self, table: &'d DeTable<'_>, own: &[&str]) -> Settings<'d> {
        let mut settings = Settings::default();
        for (one, other) in [("wait", "no_wait"), ("mode", "permits")] {
            if let (true, Some((second, _))) = (table.contains_key(one), table.get_key_value(other))
            {
                self.mistakes.add(
                    second.span().start,
                    format!("`{one}` and `{other}` set the same option: leave one out"),
                );
            }
        }
        for (field, value) in table {
            self.field(&mut settings, field, value, own);
        }
        settings
    }

    fn field<'d>(
        &mut self,
        settings: &mut Settings<'d>,
        field: &Spanned<impl AsRef<str>>,
        value: &'d Value<'_>,
        own: &[&str],
    ) {
        let name = field.get_ref().as_ref();
        let exclusive = LockSpec::exclusive;
        match name {
            "key" => {
                settings.key = self.text(name, "\"order:{id}\"", value);
                settings.mistaken_key = settings.key.is_none();
                // Checked here as well, because no route may use it.
                if let Some(key) = settings.key {
                    self.template(key);
                }
            }
            "global" => settings.global = self.flag(name, value),
            "lease" => {
                settings.lease = self.duration(name, value, |lease| exclusive().lease(lease))
            }
            "wait" => {
                settings.waiting = self
                    .duration(name, value, |wait| exclusive().wait(wait))
                    .map(Waiting::AtMost);
            }
            "no_wait" => match self.flag(name, value) {
                Some(true) => settings.waiting = Some(Waiting::No),
                Some(false) => self
                    .mistakes
                    .add(at(value), "set the wait instead: write wait = \"2s\""),
                None => {}
            },
            "mode" => {
                settings.sharing = self.word(
                    name,
                    value,
                    [
                        ("exclusive", Sharing::Exclusive),
                        ("write", Sharing::Exclusive),
                        ("read", Sharing::Shared),
                    ],
                );
            }
            "permits" => {
                let permits = self.number(name, "3", value);
                let few =
                    permits.map(|permits| u32::try_from(permits).ok().and_then(NonZeroU32::new));
                match few {
                    Some(Some(permits)) => settings.sharing = Some(Sharing::Permits(permits)),
                    Some(None) => self
                        .mistakes
                        .add(at(value), format!("`permits` must be 1 to {}", u32::MAX)),
                    None => {}
                }
            }
            "reentrant" => settings.reentrant = self.flag(name, value),
            "min_hold" => {
                settings.min_hold =
                    self.said(name, value, |min_hold| exclusive().min_hold(min_hold))
            }
            "max_hold" => {
                settings.max_hold =
                    self.said(name, value, |max_hold| exclusive().max_hold(max_hold))
            }
            "no_renew" => settings.renew = self.flag(name, value).map(|no_renew| !no_renew),
            "strict_order" => settings.strict_order = self.flag(name, value),
            "max_waiters" => {
                let waiters = self.number(name, "100", value);
                settings.max_waiters =
                    waiters.map(|waiters| usize::try_from(waiters).unwrap_or(usize::MAX));
            }
            "hold_until" => {
                settings.hold_until = self.word(
                    name,
                    value,
                    [("response", HoldUntil::Response), ("body", HoldUntil::Body)],
                );
            }
            "retry_after" => settings.retry_after = self.duration(name, value, |_| exclusive()),
            "fail_open" => settings.fail_open = self.flag(name, value),
            "status" => settings.statuses = self.statuses(value),
            _ if own.contains(&name) => {}
            _ if OF_ROUTES.contains(&name) => {
                self.mistakes.add(
                    field.span().start,
                    format!("`{name}` is a field of routes only"),
                );
            }
            _ => {
                let meant = self.unknown(
                    "field",
                    field,
                    FIELDS.into_iter().chain(own.iter().copied()),
                    &ALIASES,
                );
                settings.mistaken_key |= matches!(meant, Some("key" | "skip" | "group"));
            }
        }
    }

    fn statuses(&mut self, value: &Value<'_>) -> Vec<(ErrorClass, StatusCode)> {
        let mut statuses = Vec::new();
        for (row, value) in self.table("status", value).into_iter().flatten() {
            let Some((name, class)) = ROWS
                .into_iter()
                .find(|(name, _)| *name == row.get_ref().as_ref())
            else {
                self.unknown(
                    "row of the table of refusals",
                    row,
                    ROWS.map(|(name, _)| name),
                    &[],
                );
                continue;
            };
            let Some(number) = self.number(name, "423", value) else {
                continue;
            };
            let status = u16::try_from(number)
                .ok()
                .and_then(|number| StatusCode::from_u16(number).ok());
            match status.filter(|status| status.is_client_error() || status.is_server_error()) {
                Some(status) => statuses.push((class, status)),
                None => self
                    .mistakes
                    .add(at(value), "the status of a refusal must be from 400 to 599"),
            }
        }
        statuses
    }
}
