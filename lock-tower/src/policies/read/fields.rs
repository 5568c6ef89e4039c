//! The fields of `[defaults]`, groups and routes.

use std::{num::NonZeroU32, time::Duration};

use http::StatusCode;
use lock_runtime::{ErrorClass, LockSpec, OnLost};
use toml::{Spanned, de::DeTable};

use super::{
    Reader,
    values::{Value, at},
};
#[cfg(feature = "once")]
use crate::policy::OnceTerms;
use crate::{
    policies::settings::{ROWS, Said, Settings},
    policy::HoldUntil,
};

/// The fields that only routes have.
pub(super) const OF_ROUTES: [&str; 3] = ["name", "group", "skip"];
/// In the order of the documentation.
pub(super) const FIELDS: [&str; 21] = [
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
    "no_max_hold",
    "renew",
    "strict_order",
    "retain",
    "max_waiters",
    "on_lost",
    "hold_until",
    "retry_after",
    "fail_open",
    "status",
    "once",
];
/// Names of the same options in other libraries and in the attribute.
const ALIASES: [(&str, &str); 14] = [
    ("ttl", "lease"),
    ("expiry", "lease"),
    ("timeout", "wait"),
    ("acquire_timeout", "wait"),
    ("read", "mode"),
    ("write", "mode"),
    ("shared", "mode"),
    ("exclusive", "mode"),
    ("semaphore", "permits"),
    ("lock_at_most_for", "max_hold"),
    ("lock_at_least_for", "min_hold"),
    ("fair", "strict_order"),
    ("no_renew", "renew"),
    ("template", "key"),
];
impl Reader<'_> {
    /// Parses the fields of a table. `own` lists further fields of this table that are parsed
    /// elsewhere.
    pub(super) fn settings<'d>(&mut self, table: &'d DeTable<'_>, own: &[&str]) -> Settings<'d> {
        let mut settings = Settings::default();
        for (one, other) in [
            ("wait", "no_wait"),
            ("mode", "permits"),
            ("max_hold", "no_max_hold"),
        ] {
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
            "lease" => drop(self.duration_of(settings, name, value, LockSpec::lease)),
            "wait" => drop(self.duration_of(settings, name, value, LockSpec::wait)),
            "no_wait" => {
                let instead = "set the wait instead: write wait = \"2s\"";
                let _ = self.removal(settings, name, value, LockSpec::no_wait, instead);
            }
            "mode" => {
                let modes: [(_, fn() -> LockSpec); 2] = [
                    ("exclusive", LockSpec::exclusive),
                    ("shared", LockSpec::shared),
                ];
                settings.mode = self.word(name, value, modes).map(|mode| mode());
            }
            "permits" => {
                let permits = self.number(name, 1..=u32::MAX.into(), "3", value);
                let permits = permits.and_then(|permits| u32::try_from(permits).ok());
                if let Some(permits) = permits.and_then(NonZeroU32::new) {
                    settings.mode = Some(LockSpec::permits(permits));
                }
            }
            "min_hold" => {
                settings.min_hold = self.duration_of(settings, name, value, LockSpec::min_hold);
            }
            "max_hold" => {
                settings.max_hold = self.duration_of(settings, name, value, LockSpec::max_hold);
            }
            "retain" => drop(self.duration_of(settings, name, value, LockSpec::retain)),
            "no_max_hold" => {
                let instead = "set the max_hold instead: write max_hold = \"1m\"";
                settings.max_hold =
                    self.removal(settings, name, value, LockSpec::no_max_hold, instead);
            }
            "reentrant" => {
                self.switch(
                    settings,
                    name,
                    value,
                    LockSpec::reentrant,
                    LockSpec::no_reentrant,
                );
            }
            "renew" => self.switch(settings, name, value, LockSpec::renew, LockSpec::no_renew),
            "strict_order" => self.switch(
                settings,
                name,
                value,
                LockSpec::strict_order,
                LockSpec::no_strict_order,
            ),
            "max_waiters" => {
                if let Some(waiters) = self.number(name, 0..=u64::MAX, "100", value) {
                    let waiters = usize::try_from(waiters).unwrap_or(usize::MAX);
                    settings.set(|spec| spec.max_waiters(waiters));
                }
            }
            "on_lost" => {
                let words = [OnLost::Cancel, OnLost::Error, OnLost::Ignore];
                let words = words.map(|on_lost| (on_lost.as_str(), on_lost));
                if let Some(on_lost) = self.word(name, value, words) {
                    settings.set(|spec| spec.on_lost(on_lost));
                }
            }
            "hold_until" => {
                let words = [("response", HoldUntil::Response), ("body", HoldUntil::Body)];
                let hold_until = self.word(name, value, words);
                settings.hold_until = hold_until.map(|hold_until| Said {
                    at: at(value),
                    value: hold_until,
                });
            }
            "retry_after" => {
                settings.retry_after = self.duration(name, value, |_| LockSpec::exclusive());
            }
            "fail_open" => settings.fail_open = self.flag(name, value),
            "status" => settings.statuses = self.statuses(value),
            #[cfg(feature = "once")]
            "once" => settings.once = self.once(value),
            #[cfg(not(feature = "once"))]
            "once" => {
                let message = "`once` needs the feature `once` of lock-tower";
                self.mistakes.add(field.span().start, message);
            }
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

    /// Sets an option of the lock to a duration. Returns the offset of a valid one.
    fn duration_of(
        &mut self,
        settings: &mut Settings<'_>,
        name: &str,
        value: &Value<'_>,
        set: fn(LockSpec, Duration) -> LockSpec,
    ) -> Option<usize> {
        let alone = |duration| set(LockSpec::exclusive(), duration);
        let duration = self.duration(name, value, alone)?;
        settings.set(|spec| set(spec, duration));
        Some(at(value))
    }

    /// Removes an option of the lock. `instead` is the advice about `false`. Returns the offset of
    /// a valid value.
    fn removal(
        &mut self,
        settings: &mut Settings<'_>,
        name: &str,
        value: &Value<'_>,
        remove: fn(LockSpec) -> LockSpec,
        instead: &str,
    ) -> Option<usize> {
        if !self.flag(name, value)? {
            self.mistakes.add(at(value), instead);
            return None;
        }
        settings.set(remove);
        Some(at(value))
    }

    /// Enables or disables an option of the lock.
    fn switch(
        &mut self,
        settings: &mut Settings<'_>,
        name: &str,
        value: &Value<'_>,
        enable: fn(LockSpec) -> LockSpec,
        disable: fn(LockSpec) -> LockSpec,
    ) {
        if let Some(enabled) = self.flag(name, value) {
            settings.set(if enabled { enable } else { disable });
        }
    }

    /// Parses `once`: the time alone, or a table.
    #[cfg(feature = "once")]
    fn once(&mut self, value: &Value<'_>) -> Option<Said<OnceTerms>> {
        let mut terms = OnceTerms::default();
        let any = |_| LockSpec::exclusive();
        if value.get_ref().is_table() {
            for (part, value) in self.table("once", value).into_iter().flatten() {
                match part.get_ref().as_ref() {
                    "keep" => terms.keep = self.duration("keep", value, any)?,
                    "result" => terms.most_of_response = self.size("result", "64KiB", value)?,
                    "request" => terms.most_of_request = self.size("request", "1MiB", value)?,
                    _ => {
                        let aliases =
                            [("response", "result"), ("ttl", "keep"), ("body", "request")];
                        self.unknown(
                            "part of `once`",
                            part,
                            ["keep", "result", "request"],
                            &aliases,
                        );
                        return None;
                    }
                }
            }
        } else if value.get_ref().is_str() {
            terms.keep = self.duration("once", value, any)?;
        } else {
            let message = format!(
                "expected a time or a table, found {}: write once = \"24h\"",
                super::values::kind(value)
            );
            self.mistakes.add(at(value), message);
            return None;
        }
        Some(Said {
            at: at(value),
            value: terms,
        })
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
            let number = self.number(name, 400..=599, "423", value);
            let status = number.and_then(|number| u16::try_from(number).ok());
            if let Some(status) = status.and_then(|status| StatusCode::from_u16(status).ok()) {
                statuses.push((class, status));
            }
        }
        statuses
    }
}
