//! Reads a policy file. It goes on after a mistake, so that one reading finds all of them.

use std::{collections::HashMap, num::NonZeroU32, sync::Arc, time::Duration};

use http::StatusCode;
use lock_runtime::{LockSpec, web::Answer};
use toml::{
    Spanned,
    de::{DeInteger, DeTable, DeValue},
};

use super::{
    mistake::{Mistakes, PolicyError},
    route::Route,
    settings::{Said, Settings, Sharing, Waiting},
    table::{Entry, Table},
};
use crate::{key::KeyTemplate, protocol::Hold};

const TABLES: [&str; 3] = ["defaults", "groups", "routes"];
/// What only a route says.
const OF_ROUTES: [&str; 3] = ["name", "group", "skip"];
/// In the order of the manual.
const FIELDS: [&str; 17] = [
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
    "hold",
    "retry_after",
    "fail_open",
    "status",
];
/// What other libraries, and the attribute, call it.
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
/// The table of refusals.
pub(super) const ROWS: [(&str, Answer); 6] = [
    ("busy", Answer::Busy),
    ("overloaded", Answer::Overloaded),
    ("unavailable", Answer::Unavailable),
    ("lost", Answer::Lost),
    ("bad_request", Answer::BadRequest),
    ("internal", Answer::Internal),
];

type Value<'t> = Spanned<DeValue<'t>>;

/// The policies of `text`.
pub(super) fn read(text: &str) -> Result<Table, PolicyError> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader { mistakes: Mistakes::of(text, &errors) };
    let table = reader.document(document.get_ref());
    reader.mistakes.into_result()?;
    Ok(table)
}

struct Reader<'t> {
    mistakes: Mistakes<'t>,
}

impl Reader<'_> {
    fn document(&mut self, document: &DeTable<'_>) -> Table {
        let unknown = document.keys().filter(|name| !TABLES.contains(&name.get_ref().as_ref()));
        let meant: Vec<_> = unknown.filter_map(|name| self.unknown_table(name)).collect();
        let defaults = document.get("defaults").and_then(|defaults| self.table("defaults", defaults));
        let defaults = defaults.map(|defaults| self.settings(defaults, &[])).unwrap_or_default();
        let groups = document.get("groups").and_then(|groups| self.table("groups", groups));
        let groups: HashMap<_, _> = groups
            .into_iter()
            .flat_map(DeTable::iter)
            .map(|(name, group)| {
                let group = self.table("a group", group).map(|group| self.settings(group, &[]));
                (name.get_ref().as_ref(), group.unwrap_or_default().or(&defaults))
            })
            .collect();
        let routes = document.get("routes").and_then(|routes| self.table("routes", routes));
        if routes.map_or(!document.contains_key("routes") && !meant.contains(&"routes"), DeTable::is_empty) {
            // An empty file, half written perhaps, must not take the locks off all routes.
            let message = "there is no route: write one, such as [routes.\"POST /orders/{id}\"]";
            self.mistakes.add_missing(document.get("routes").map_or(0, at), message);
        }
        // Unless they are told already to be called otherwise.
        let groups = (!meant.contains(&"groups")).then_some(groups);
        let mut names = HashMap::new();
        let mut routes: Vec<_> = routes.into_iter().flat_map(DeTable::iter).collect();
        // In the order of the text, so that of two that contradict each other the second is told.
        routes.sort_by_key(|(route, _)| route.span().start);
        let entries = routes
            .into_iter()
            .filter_map(|(route, said)| self.route(route, said, &defaults, groups.as_ref(), &mut names))
            .collect();
        Table::new(entries, &mut self.mistakes)
    }

    fn route<'d>(
        &mut self,
        written: &Spanned<impl AsRef<str>>,
        said: &'d Value<'_>,
        defaults: &Settings<'d>,
        groups: Option<&HashMap<&str, Settings<'d>>>,
        names: &mut HashMap<String, usize>,
    ) -> Option<Entry> {
        let begin = written.span().start;
        let text = written.get_ref().as_ref();
        let said = self.table("a route", said);
        let below = said.and_then(|said| said.keys().find(|key| key.get_ref().contains('/')));
        if let Some(path) = below.filter(|_| !text.contains('/')) {
            let whole = format!("{text} {}", path.get_ref());
            self.mistakes.add(begin, format!("a route is called by one name: write [routes.{whole:?}]"));
            return None;
        }
        let route = Route::parse(text).map_err(|complaint| self.mistakes.add(begin, complaint)).ok();
        let said = said?;

        let named = said.get("name").and_then(|name| self.text("name", "\"pay\"", name));
        let name = named.map_or(text, |name| name.value).to_owned();
        if let Some(other) = names.insert(name.clone(), begin) {
            let line = self.mistakes.line(other);
            let place = named.map_or(begin, |name| name.at);
            self.mistakes.add(place, format!("the route in line {line} is called {name:?} as well: rename one"));
        }
        let skip = said.get("skip").map(|skip| self.flag("skip", skip));
        if skip == Some(Some(true)) {
            for (field, _) in said.iter().filter(|(field, _)| !matches!(field.get_ref().as_ref(), "name" | "skip")) {
                let message = format!("a route that is skipped takes no lock: leave `{}` out", field.get_ref());
                self.mistakes.add(field.span().start, message);
            }
            return Some(Entry { route: route?, at: begin, lock: None });
        }
        let group = said.get("group").map(|group| groups.and_then(|groups| self.group(group, groups)));
        let own = self.settings(said, &OF_ROUTES);
        let settings = own.or(group.flatten().unwrap_or(defaults));
        let policy = settings.policy(&name, &mut self.mistakes);
        let Some(key) = settings.key else {
            // Not after a mistake that may be the reason.
            if !settings.mistaken_key && !matches!(group, Some(None)) && skip != Some(None) {
                let message = "the route has no key: write one, such as key = \"order:{id}\", or skip = true";
                self.mistakes.add_missing(begin, message);
            }
            return None;
        };
        let key = self.key(key, settings.global == Some(true), text, route.as_ref());
        Some(Entry { route: route?, at: begin, lock: Some((key?, Arc::new(policy))) })
    }

    /// The settings of the group that a route names.
    fn group<'g, 'd>(&mut self, said: &Value<'_>, groups: &'g HashMap<&str, Settings<'d>>) -> Option<&'g Settings<'d>> {
        let group = self.text("group", "\"orders\"", said)?;
        let found = groups.get(group.value);
        if found.is_none() {
            let bare = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            let advice = match nearest(group.value, groups.keys().copied()) {
                Some(near) => format!("did you mean {near:?}?"),
                None if group.value.bytes().all(bare) && !group.value.is_empty() => {
                    format!("write [groups.{}]", group.value)
                }
                None => format!("write [groups.{:?}]", group.value),
            };
            self.mistakes.add_missing(group.at, format!("there is no group {:?}: {advice}", group.value));
        }
        found
    }

    /// A template that requests of the route can fill.
    fn key(&mut self, key: Said<&str>, global: bool, written: &str, route: Option<&Route>) -> Option<KeyTemplate> {
        let template = match KeyTemplate::parse(key.value) {
            Ok(template) => template,
            Err(error) => {
                self.mistakes.add(self.within(key, error.at()), format!("this key cannot be: {}", error.complaint()));
                return None;
            }
        };
        let route = route?;
        for (name, placed) in template.params().filter(|(name, _)| !route.params.iter().any(|param| **param == **name))
        {
            let advice = match nearest(name, route.params.iter().map(|param| &**param)) {
                Some(near) => format!("did you mean {{{near}}}?"),
                None if route.params.is_empty() => "it has none".to_owned(),
                None => format!("it has {{{}}}", route.params.join("}, {")),
            };
            let message = format!("the route {written:?} has no parameter {{{name}}}: {advice}");
            self.mistakes.add(self.within(key, placed), message);
        }
        if let Some(placed) = template.asks_for_grpc()
            && !route.may_be_grpc()
        {
            let message = format!(
                "the route {written:?} is not that of a gRPC method, which is posted to \"/package.Service/Method\""
            );
            self.mistakes.add(self.within(key, placed), message);
        }
        if template.is_constant() && !global {
            let message = format!(
                "this key is the same for every request: name a part of the request, such as {}, or say global = true",
                route.params.first().map_or("{header.x-tenant}".into(), |param| format!("{{{param}}}"))
            );
            self.mistakes.add(key.at, message);
        }
        Some(template)
    }

    /// Where the byte `index` of a string is written; its beginning if it has escapes.
    fn within(&self, said: Said<&str>, index: usize) -> usize {
        let written = self.mistakes.text().get(said.at + 1..).unwrap_or_default();
        if written.starts_with(said.value) { said.at + 1 + index } else { said.at }
    }

    /// What a table says; `own` are the names that it may have beside, and that others read.
    fn settings<'d>(&mut self, table: &'d DeTable<'_>, own: &[&str]) -> Settings<'d> {
        let mut settings = Settings::default();
        for (one, other) in [("wait", "no_wait"), ("mode", "permits")] {
            if let (true, Some((second, _))) = (table.contains_key(one), table.get_key_value(other)) {
                self.mistakes
                    .add(second.span().start, format!("`{one}` and `{other}` say the same thing: leave one out"));
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
            }
            "global" => settings.global = self.flag(name, value),
            "lease" => settings.lease = self.duration(name, value, |lease| exclusive().lease(lease)),
            "wait" => {
                settings.waiting = self.duration(name, value, |wait| exclusive().wait(wait)).map(Waiting::AtMost);
            }
            "no_wait" => match self.flag(name, value) {
                Some(true) => settings.waiting = Some(Waiting::No),
                Some(false) => self.mistakes.add(at(value), "say how long to wait instead: write wait = \"2s\""),
                None => {}
            },
            "mode" => {
                settings.sharing = self.word(
                    name,
                    value,
                    [("exclusive", Sharing::Exclusive), ("write", Sharing::Exclusive), ("read", Sharing::Shared)],
                );
            }
            "permits" => {
                let permits = self.number(name, "3", value);
                let few = permits.map(|permits| u32::try_from(permits).ok().and_then(NonZeroU32::new));
                match few {
                    Some(Some(permits)) => settings.sharing = Some(Sharing::Permits(permits)),
                    Some(None) => self.mistakes.add(at(value), format!("permits are 1 to {}", u32::MAX)),
                    None => {}
                }
            }
            "reentrant" => settings.reentrant = self.flag(name, value),
            "min_hold" => settings.min_hold = self.said(name, value, |min_hold| exclusive().min_hold(min_hold)),
            "max_hold" => settings.max_hold = self.said(name, value, |max_hold| exclusive().max_hold(max_hold)),
            "no_renew" => settings.renew = self.flag(name, value).map(|no_renew| !no_renew),
            "strict_order" => settings.strict_order = self.flag(name, value),
            "max_waiters" => {
                let waiters = self.number(name, "100", value);
                settings.max_waiters = waiters.map(|waiters| usize::try_from(waiters).unwrap_or(usize::MAX));
            }
            "hold" => {
                settings.hold = self.word(name, value, [("response", Hold::Response), ("body", Hold::Body)]);
            }
            "retry_after" => settings.retry_after = self.duration(name, value, |_| exclusive()),
            "fail_open" => settings.fail_open = self.flag(name, value),
            "status" => settings.statuses = self.statuses(value),
            _ if own.contains(&name) => {}
            _ if OF_ROUTES.contains(&name) => {
                self.mistakes.add(field.span().start, format!("only a route has a `{name}`"));
            }
            _ => {
                let meant = self.unknown("field", field, FIELDS.into_iter().chain(own.iter().copied()), &ALIASES);
                settings.mistaken_key |= matches!(meant, Some("key" | "skip" | "group"));
            }
        }
    }

    /// Which table was probably meant.
    fn unknown_table(&mut self, name: &Spanned<impl AsRef<str>>) -> Option<&'static str> {
        let text = name.get_ref().as_ref();
        let at = name.span().start;
        if text.contains('/') {
            self.mistakes.add(at, format!("a route is a table of `routes`: write [routes.{text:?}]"));
            return Some("routes");
        }
        if FIELDS.contains(&text) {
            let message = format!("`{text}` is said of routes: write it below [defaults], or below a group or a route");
            // Below a heading that cannot be read, it may be where it belongs.
            self.mistakes.add_missing(at, message);
            return None;
        }
        self.unknown("table", name, TABLES, &[])
    }

    fn statuses(&mut self, value: &Value<'_>) -> Vec<(Answer, StatusCode)> {
        let mut statuses = Vec::new();
        for (row, value) in self.table("status", value).into_iter().flatten() {
            let Some((name, answer)) = ROWS.into_iter().find(|(name, _)| *name == row.get_ref().as_ref()) else {
                self.unknown("row of the table of refusals", row, ROWS.map(|(name, _)| name), &[]);
                continue;
            };
            let Some(number) = self.number(name, "423", value) else { continue };
            let status = u16::try_from(number).ok().and_then(|number| StatusCode::from_u16(number).ok());
            match status.filter(|status| status.is_client_error() || status.is_server_error()) {
                Some(status) => statuses.push((answer, status)),
                None => self.mistakes.add(at(value), "a refusal has a status from 400 to 599"),
            }
        }
        statuses
    }

    fn unknown<'n>(
        &mut self,
        what: &str,
        name: &Spanned<impl AsRef<str>>,
        known: impl IntoIterator<Item = &'n str>,
        aliases: &[(&str, &'n str)],
    ) -> Option<&'n str> {
        let text = name.get_ref().as_ref();
        let known: Vec<_> = known.into_iter().collect();
        let alias = aliases.iter().find(|(alias, _)| *alias == text).map(|(_, known)| *known);
        let meant = alias.or_else(|| nearest(text, known.iter().copied()));
        let advice = match meant {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("there are {}", known.join(", ")),
        };
        self.mistakes.add(name.span().start, format!("there is no {what} `{}`: {advice}", text.escape_debug()));
        meant
    }

    fn table<'v, 'd>(&mut self, name: &str, value: &'v Value<'d>) -> Option<&'v DeTable<'d>> {
        let table = value.get_ref().as_table();
        if table.is_none() {
            let advice = match (name, value.get_ref()) {
                ("routes" | "groups", _) => format!(": write [{name}.\"..\"] for each"),
                (_, DeValue::Array(_)) => ": write [..] for [[..]]".to_owned(),
                ("status", _) => ": write status = { busy = 423 }".to_owned(),
                _ => ": write { key = \"order:{id}\" }".to_owned(),
            };
            self.mistakes.add(at(value), format!("{name} is a table, not {}{advice}", kind(value)));
        }
        table
    }

    fn text<'d>(&mut self, name: &str, example: &str, value: &'d Value<'_>) -> Option<Said<&'d str>> {
        let text = value.get_ref().as_str();
        if text.is_none() {
            self.mistakes.add(at(value), format!("a string is meant, not {}: write {name} = {example}", kind(value)));
        }
        text.map(|text| Said { at: at(value), value: text })
    }

    fn flag(&mut self, name: &str, value: &Value<'_>) -> Option<bool> {
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            let message = format!("true or false is meant, not {}: write {name} = true", kind(value));
            self.mistakes.add(at(value), message);
        }
        flag
    }

    fn number(&mut self, name: &str, example: &str, value: &Value<'_>) -> Option<u64> {
        let number = value.get_ref().as_integer();
        let number = number.map(|number: &DeInteger<'_>| u64::from_str_radix(number.as_str(), number.radix()));
        match number {
            Some(Ok(number)) => return Some(number),
            Some(Err(_)) => self.mistakes.add(at(value), format!("`{name}` is out of range: write {name} = {example}")),
            None => {
                let message = format!("a whole number is meant, not {}: write {name} = {example}", kind(value));
                self.mistakes.add(at(value), message);
            }
        }
        None
    }

    fn word<T: Copy, const N: usize>(&mut self, name: &str, value: &Value<'_>, words: [(&str, T); N]) -> Option<T> {
        let said = self.text(name, &format!("{:?}", words[0].0), value)?;
        let found = words.iter().find(|(word, _)| *word == said.value);
        if found.is_none() {
            let words = words.map(|(word, _)| format!("{word:?}"));
            self.mistakes.add(said.at, format!("`{name}` is {}, not {:?}", words.join(" or "), said.value));
        }
        found.map(|(_, meaning)| *meaning)
    }

    /// A duration that is fit for the lock: `spec` says where it goes.
    fn duration(&mut self, name: &str, value: &Value<'_>, spec: impl Fn(Duration) -> LockSpec) -> Option<Duration> {
        let seconds = value.get_ref().as_integer().map_or("2", DeInteger::as_str);
        let said = self.text(name, &format!("\"{seconds}s\""), value)?;
        let duration = match humantime::parse_duration(said.value) {
            Ok(duration) => duration,
            Err(error) => {
                let bare = !said.value.is_empty() && said.value.bytes().all(|byte| byte.is_ascii_digit());
                let seconds = if bare { said.value } else { "2" };
                let message = format!(
                    "{:?} is no duration ({error}): write {name} = \"{seconds}s\", \"500ms\" or the like",
                    said.value
                );
                self.mistakes.add(said.at, message);
                return None;
            }
        };
        match spec(duration).check() {
            Ok(()) => Some(duration),
            Err(error) => {
                self.mistakes.add(said.at, error.to_string());
                None
            }
        }
    }

    fn said(&mut self, name: &str, value: &Value<'_>, spec: impl Fn(Duration) -> LockSpec) -> Option<Said<Duration>> {
        let duration = self.duration(name, value, spec)?;
        Some(Said { at: at(value), value: duration })
    }
}

/// Where a value is written.
fn at(value: &Value<'_>) -> usize {
    value.span().start
}

fn kind(value: &Value<'_>) -> &'static str {
    match value.get_ref() {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}

/// Which of the names was probably meant.
fn nearest<'n>(text: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let near = names.into_iter().map(|name| (strsim::damerau_levenshtein(text, name), name));
    near.filter(|(distance, name)| *distance <= (name.len() / 3).max(1)).min().map(|(_, name)| name)
}
