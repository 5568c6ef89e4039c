//! The parser of policy files. It continues after a mistake, so that one pass finds all of them.

mod fields;
mod values;

use std::{collections::HashMap, sync::Arc};

use toml::{Spanned, de::DeTable};

use self::{
    fields::{FIELDS, OF_ROUTES},
    values::{Value, at, nearest},
};
use super::{
    mistake::{Mistakes, PolicyError},
    route::Route,
    settings::{Said, Settings},
    table::{Entry, Table},
};
use crate::key::{KeyTemplate, TemplateError};

const TABLES: [&str; 3] = ["defaults", "groups", "routes"];
/// Parses the policies of `text`.
pub(super) fn read(text: &str) -> Result<Table, PolicyError> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader {
        mistakes: Mistakes::of(text, &errors),
    };
    let table = reader.document(document.get_ref());
    reader.mistakes.into_result()?;
    Ok(table)
}

struct Reader<'t> {
    mistakes: Mistakes<'t>,
}

impl Reader<'_> {
    fn document(&mut self, document: &DeTable<'_>) -> Table {
        let unknown = document
            .keys()
            .filter(|name| !TABLES.contains(&name.get_ref().as_ref()));
        let meant: Vec<_> = unknown
            .filter_map(|name| self.unknown_table(name))
            .collect();
        let defaults = document
            .get("defaults")
            .and_then(|defaults| self.table("defaults", defaults));
        let defaults = defaults
            .map(|defaults| self.settings(defaults, &[]))
            .unwrap_or_default();
        let groups = document
            .get("groups")
            .and_then(|groups| self.table("groups", groups));
        let groups: HashMap<_, _> = groups
            .into_iter()
            .flat_map(DeTable::iter)
            .map(|(name, group)| {
                let group = self
                    .table("a group", group)
                    .map(|group| self.settings(group, &[]));
                (
                    name.get_ref().as_ref(),
                    group.unwrap_or_default().or(&defaults),
                )
            })
            .collect();
        let routes = document
            .get("routes")
            .and_then(|routes| self.table("routes", routes));
        if routes.map_or(
            !document.contains_key("routes") && !meant.contains(&"routes"),
            DeTable::is_empty,
        ) {
            // An empty or partly written file must not remove the locks of all routes.
            let message = "there is no route: write one, such as [routes.\"POST /orders/{id}\"]";
            self.mistakes
                .add_missing(document.get("routes").map_or(0, at), message);
        }
        // If a misspelled table may be `groups`, do not report its groups as missing, too.
        let groups = (!meant.contains(&"groups")).then_some(groups);
        let mut names = HashMap::new();
        let mut routes: Vec<_> = routes.into_iter().flat_map(DeTable::iter).collect();
        // In the order of the text, so that of two conflicting routes the second is reported.
        routes.sort_by_key(|(route, _)| route.span().start);
        let entries = routes
            .into_iter()
            .filter_map(|(route, said)| {
                self.route(route, said, &defaults, groups.as_ref(), &mut names)
            })
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
            self.mistakes.add(
                begin,
                format!("a route has a single name: write [routes.{whole:?}]"),
            );
            return None;
        }
        let route = Route::parse(text)
            .map_err(|complaint| self.mistakes.add(begin, complaint))
            .ok();
        let said = said?;

        let named = said
            .get("name")
            .and_then(|name| self.text("name", "\"pay\"", name));
        let name = named.map_or(text, |name| name.value).to_owned();
        if let Some(other) = names.insert(name.clone(), begin) {
            let line = self.mistakes.line(other);
            let place = named.map_or(begin, |name| name.at);
            self.mistakes.add(
                place,
                format!("the route in line {line} has the name {name:?} as well: rename one"),
            );
        }
        let skip = said.get("skip").map(|skip| self.flag("skip", skip));
        if skip == Some(Some(true)) {
            for (field, _) in said
                .iter()
                .filter(|(field, _)| !matches!(field.get_ref().as_ref(), "name" | "skip"))
            {
                let message = format!(
                    "a route that is skipped takes no lock: leave `{}` out",
                    field.get_ref()
                );
                self.mistakes.add(field.span().start, message);
            }
            return Some(Entry {
                route: route?,
                at: begin,
                lock: None,
                has_literal_twin: false,
            });
        }
        let group = said
            .get("group")
            .map(|group| groups.and_then(|groups| self.group(group, groups)));
        let own = self.settings(said, &OF_ROUTES);
        let settings = own.or(group.flatten().unwrap_or(defaults));
        let policy = settings.policy(&name, &mut self.mistakes);
        let Some(key) = settings.key else {
            // Not reported after a mistake that may be the cause.
            if !settings.mistaken_key && !matches!(group, Some(None)) && skip != Some(None) {
                let message =
                    "the route has no key: write one, such as key = \"order:{id}\", or skip = true";
                self.mistakes.add_missing(begin, message);
            }
            return None;
        };
        let key = self.key(key, settings.global == Some(true), text, route.as_ref());
        #[cfg(feature = "once")]
        if let (Some(key), Some(_)) = (&key, settings.once) {
            key.warn_without_caller(&name);
        }
        Some(Entry {
            route: route?,
            at: begin,
            lock: Some((key?, Arc::new(policy))),
            has_literal_twin: false,
        })
    }

    /// Returns the settings of the group that a route names.
    fn group<'g, 'd>(
        &mut self,
        said: &Value<'_>,
        groups: &'g HashMap<&str, Settings<'d>>,
    ) -> Option<&'g Settings<'d>> {
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
            self.mistakes.add_missing(
                group.at,
                format!("there is no group {:?}: {advice}", group.value),
            );
        }
        found
    }

    /// Parses the key of a route, and checks that requests of the route can fill it.
    fn key(
        &mut self,
        key: Said<&str>,
        global: bool,
        written: &str,
        route: Option<&Route>,
    ) -> Option<KeyTemplate> {
        let template = self.template(key)?;
        let route = route?;
        for (name, placed) in template
            .params()
            .filter(|(name, _)| !route.params.iter().any(|param| **param == **name))
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
                "the route {written:?} cannot match a gRPC method, which is called by a POST to \"/package.Service/Method\""
            );
            self.mistakes.add(self.within(key, placed), message);
        }
        if template.is_constant() && !global {
            let message = format!(
                "this key is the same for every request: name a part of the request, such as {}, or set global = true",
                route
                    .params
                    .iter()
                    .find(|param| !matches!(&***param, "method" | "matched_path"))
                    .map_or("{header.x-tenant}".into(), |param| format!("{{{param}}}"))
            );
            self.mistakes.add(key.at, message);
        }
        Some(template)
    }

    /// Parses a key template. A malformed one is reported only once, however often it is parsed.
    fn template(&mut self, key: Said<&str>) -> Option<KeyTemplate> {
        let complain = |error: TemplateError| {
            self.mistakes.add(
                self.within(key, error.at()),
                format!("invalid key: {}", error.complaint()),
            );
        };
        KeyTemplate::parse(key.value).map_err(complain).ok()
    }

    /// Returns the offset of the byte `index` of a string, or of its start if it has escapes.
    fn within(&self, said: Said<&str>, index: usize) -> usize {
        let written = self.mistakes.text().get(said.at + 1..).unwrap_or_default();
        if written.starts_with(said.value) {
            said.at + 1 + index
        } else {
            said.at
        }
    }

    /// Reports an unknown table, and returns the table that was probably meant.
    fn unknown_table(&mut self, name: &Spanned<impl AsRef<str>>) -> Option<&'static str> {
        let text = name.get_ref().as_ref();
        let at = name.span().start;
        if text.contains('/') {
            self.mistakes.add(
                at,
                format!("a route is a table of `routes`: write [routes.{text:?}]"),
            );
            return Some("routes");
        }
        if FIELDS.contains(&text) {
            let message = format!(
                "`{text}` is a setting of routes: write it in [defaults], in a group or in a route"
            );
            // It may be in the right place if the heading above it cannot be parsed.
            self.mistakes.add_missing(at, message);
            return None;
        }
        self.unknown("table", name, TABLES, &[])
    }
}
