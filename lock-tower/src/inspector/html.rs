//! The views as HTML.

use std::time::{Duration, SystemTime};

use humantime::format_rfc3339_seconds;
use lock_runtime::{
    LockError, LockErrorKind, LockKey, LockKind, Mode,
    health::Health,
    operator::{Activity, Holder, Identity, Inspection, ListedLock, LockPage, Waiter},
    text::{brief, visible},
};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    assets::Asset,
    content::Content,
    query::{Format, View, kind_name},
};

/// The number of holders, and of waiters, that are shown.
const SHOWN: usize = 200;

/// A whole page.
pub(super) fn page(
    view: &View,
    content: &Content,
    message: Option<&str>,
    may_revoke: bool,
    of: Option<&str>,
) -> Markup {
    let title = match view {
        View::Locks { .. } => "Locks".into(),
        View::Lock { key, .. } => format!("Lock {}", visible(key.as_str())),
        View::Activity => "Activity".into(),
        View::Health => "Health".into(),
    };
    let prefix = match view {
        View::Locks { prefix, .. } => prefix,
        _ => "",
    };
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="robots" content="noindex";
                title { (title) @if let Some(of) = of { " - " (of) } }
                style { (PreEscaped(BUTTON)) }
                link rel="stylesheet" href=(Asset::STYLE);
                script src=(Asset::SCRIPT) defer {}
            }
            body {
                header {
                    @if let Some(of) = of { strong { bdi { (of) } } }
                    nav aria-label="Views" {
                        (tab(view, "Locks", View::all_locks()))
                        (tab(view, "Activity", View::Activity))
                        (tab(view, "Health", View::Health))
                    }
                    form role="search" method="get" action="?" {
                        label for="prefix" { "Prefix" }
                        input id="prefix" name="prefix" type="search" value=(prefix) autocomplete="off" spellcheck="false";
                        button { "Search" }
                    }
                }
                main {
                    h1 { bdi { (title) } }
                    @if let Some(message) = message {
                        p.message role="status" { (message) }
                    }
                    div #live data-events=(view.link(Format::Events)) { (live(view, content, may_revoke)) }
                }
                footer {
                    a href=(view.link(Format::Json)) { "JSON" }
                    span #state role="status" {}
                }
            }
        }
    }
}

fn tab(current: &View, name: &str, view: View) -> Markup {
    let is_current = match (&view, current) {
        (View::Locks { .. }, View::Locks { .. } | View::Lock { .. }) => true,
        (view, current) => view == current,
    };
    html! {
        a href=(view.link(Format::Html)) aria-current=[is_current.then_some("page")] { (name) }
    }
}

/// The part of a page that refreshes itself.
pub(super) fn live(view: &View, content: &Content, may_revoke: bool) -> Markup {
    match (view, content) {
        (View::Locks { prefix, .. }, Content::Locks(page)) => locks(prefix, page),
        (View::Lock { key, kind }, Content::Lock(state, other)) => html! {
            @match state {
                Ok(state) => { (lock(key, *kind, state, may_revoke)) }
                Err(error) => { (error_of_lock(error)) }
            }
            @if *other > 0 { (other_kind(key, *kind, *other)) }
        },
        (_, Content::Activity(seen)) => activity(seen),
        (_, Content::Health(health)) => health_of(health),
        _ => html! {},
    }
}

fn locks(prefix: &str, page: &LockPage) -> Markup {
    let first_page = View::Locks {
        prefix: prefix.into(),
        after: None,
    };
    let next_page = page.next.clone().map(|next| View::Locks {
        prefix: prefix.into(),
        after: Some(next),
    });
    html! {
        (errors(&page.errors))
        @if page.total == 0 && page.errors.is_empty() && page.is_complete {
            p { "No lock is held" @if !prefix.is_empty() { " under this prefix" } "." }
        } @else {
            table {
                caption {
                    @if !page.locks.is_empty() {
                        (page.offset + 1) " to " (page.offset + page.locks.len()) " of "
                    }
                    @if !page.is_complete { "at least " }
                    (page.total) " names"
                }
                thead { tr {
                    th scope="col" { "Key" } th scope="col" { "Mode" } th scope="col" { "Held by" }
                    th scope="col" { "Held for" } th scope="col" { "Time left" } th scope="col" { "Latest token" }
                    th scope="col" { "Waiters" }
                } }
                tbody { @for lock in &page.locks { (row(lock)) } }
            }
        }
        @if page.offset > 0 || next_page.is_some() {
            nav aria-label="Pages" {
                @if page.offset > 0 { a href=(first_page.link(Format::Html)) { "First page" } }
                @if let Some(next) = next_page { a href=(next.link(Format::Html)) rel="next" { "Next page" } }
            }
        }
    }
}

fn row(lock: &ListedLock) -> Markup {
    let ListedLock {
        key, kind, state, ..
    } = lock;
    let view = View::Lock {
        key: key.clone(),
        kind: *kind,
    };
    let link = view.link(Format::Html);
    let holder = state.holders.first();
    let waited = state.waiters.iter().filter_map(|it| it.waited).max();
    html! {
        tr id=(link) {
            th scope="row" data-label="Key" { a href=(link) { bdi { (visible(key.as_str())) } } }
            td data-label="Mode" {
                @match holder.map(|holder| holder.mode) {
                    Some(Mode::Permits(permits)) => { (state.holders.len()) " of " (permits) " permits" }
                    Some(mode) => { (mode.as_str()) }
                    None => { (kind_name(*kind)) }
                }
            }
            td data-label="Held by" {
                @match holder {
                    Some(holder) => { (client(&holder.client)) (reserved(holder)) }
                    None => { "no holder" }
                }
                @if state.holders.len() > 1 { " and " (state.holders.len() - 1) " more" }
            }
            td data-label="Held for" { (since(holder.and_then(|it| it.held_for))) }
            td data-label="Time left" { (left(holder)) }
            td.number data-label="Latest token" { (fence(state)) }
            td data-label="Waiters" {
                (state.waiters.len())
                @if let Some(waited) = waited { ", up to " (brief(waited)) }
            }
        }
    }
}

fn lock(key: &LockKey, kind: LockKind, state: &Inspection, may_revoke: bool) -> Markup {
    html! {
        p {
            @if kind == LockKind::Permits { "Permits. " }
            @if state.holders.is_empty() {
                @if state.blocked_by.is_empty() { "Free. " } @else { "Without a holder, and blocked. " }
            }
            "Latest fencing token: " span.number { (fence(state)) }
        }
        @for session in &state.blocked_by {
            p { "It is granted to no other client until the transaction of " bdi { (visible(session)) } " ends." }
        }
        @if !state.holders.is_empty() {
            table {
                caption { "Holders: " (state.holders.len()) (first_of(state.holders.len())) }
                thead { tr {
                    th scope="col" { "Client" } th scope="col" { "Mode" } th scope="col" { "Held for" }
                    th scope="col" { "Time left" } th scope="col" { "Holder" }
                    @if may_revoke { th scope="col" { "Revoke" } }
                } }
                tbody { @for holder in state.holders.iter().take(SHOWN) {
                    tr id=(holder.id) {
                        th scope="row" data-label="Client" { (client(&holder.client)) (reserved(holder)) }
                        td data-label="Mode" { (mode(holder.mode)) }
                        td data-label="Held for" { (since(holder.held_for)) }
                        td data-label="Time left" { (left(Some(holder))) }
                        td.number data-label="Holder" { (holder.id) }
                        @if may_revoke { td data-label="Revoke" { (revoke(key, kind, holder)) } }
                    }
                } }
            }
        }
        @if !state.waiters.is_empty() {
            table {
                caption { "Waiters: " (state.waiters.len()) (first_of(state.waiters.len())) }
                thead { tr {
                    th scope="col" { "Client" } th scope="col" { "Mode" } th scope="col" { "Waits for" }
                    th scope="col" { "Last call" } th scope="col" { "Lease" }
                } }
                tbody { @for waiter in state.waiters.iter().take(SHOWN) { (waiter_row(waiter)) } }
            }
        }
    }
}

/// The other lock of this name, with a number of holders.
fn other_kind(key: &LockKey, kind: LockKind, holders: usize) -> Markup {
    let (kind, name) = match kind {
        LockKind::Permits => (LockKind::Lock, "The lock"),
        _ => (LockKind::Permits, "Permits"),
    };
    let view = View::Lock {
        key: key.clone(),
        kind,
    };
    html! {
        p {
            a href=(view.link(Format::Html)) { (name) " of this name" }
            ": holders: " (holders) "."
        }
    }
}

fn first_of(all: usize) -> String {
    match all > SHOWN {
        true => format!(", the first {SHOWN} of them:"),
        false => String::new(),
    }
}

fn waiter_row(waiter: &Waiter) -> Markup {
    html! {
        tr {
            th scope="row" data-label="Client" { (client(&waiter.client)) }
            td data-label="Mode" { (mode(waiter.mode)) }
            td data-label="Waits for" { (since(waiter.waited)) }
            td data-label="Last call" { (brief(waiter.silent)) " ago" }
            td data-label="Lease" { (brief(waiter.lease)) }
        }
    }
}

/// Style of the button that revokes. A part of the page, as another site can keep the style sheet
/// from being loaded.
///
/// The text of a closed button cannot be found: a browser opens what hides the text that a link of
/// another site names. An open one is beside what opens it, and opening it moves nothing sideways:
/// when the page scrolls up or down, two presses at one place do not revoke.
pub(super) const BUTTON: &str = "details:not([open])>form{display:none}\
    html{scrollbar-gutter:stable}details{width:14.25rem}summary{width:5rem}\
    details button{margin-left:6.25rem;width:8rem}";

/// A button that has to be opened before it can be pressed.
fn revoke(key: &LockKey, kind: LockKind, holder: &Holder) -> Markup {
    if holder.ttl.is_none() {
        // A revocation would delete data that may not be a lock.
        return html! { "no expiry: see " code { "lockctl revoke --endless" } };
    }
    html! {
        details {
            summary { "Revoke" }
            form method="post" action="?" {
                input type="hidden" name="key" value=(key);
                input type="hidden" name="kind" value=(kind_name(kind));
                input type="hidden" name="holder" value=(holder.id);
                p { "The holder may still be at work. The next waiter gets the lock at once." }
                button { "Revoke from " (client(&holder.client)) }
            }
        }
    }
}

fn error_of_lock(error: &LockError) -> Markup {
    match error.kind() {
        LockErrorKind::ForeignKey => html! { p { "The data under this key is not a lock." } },
        _ => errors(std::slice::from_ref(error)),
    }
}

fn errors(errors: &[LockError]) -> Markup {
    html! {
        @if let Some(error) = errors.first() {
            p.error role="alert" {
                (visible(&format!("{error:#}")))
                @if errors.len() > 1 { " (and " (errors.len() - 1) " more errors)" }
                " " a href=(View::Health.link(Format::Html)) { "Health of the store" }
            }
        }
    }
}

fn activity(activity: &Activity) -> Markup {
    html! {
        p { "Of this process, in the " (brief(activity.age)) " since its client was created." }
        @if activity.names.is_empty() {
            p { "No request has waited or failed, and no lock was lost." }
        } @else {
            table {
                caption { "Contention by name" }
                thead { tr {
                    th scope="col" { "Name" } th scope="col" { "Waited" } th scope="col" { "Given up" }
                    th scope="col" { "Failed" } th scope="col" { "Lost" } th scope="col" { "Latest" }
                } }
                tbody { @for name in &activity.names {
                    tr id={ "name-" (visible(name.name.as_str())) } {
                        th scope="row" data-label="Name" { bdi { (visible(name.name.as_str())) } }
                        td.number data-label="Waited" { (name.contended) }
                        td.number data-label="Given up" { (name.refused) }
                        td.number data-label="Failed" { (name.failed) }
                        td.number data-label="Lost" { (name.lost) }
                        td data-label="Latest" {
                            @if let Some(key) = &name.latest_key { bdi { (visible(key.as_str())) } ", " }
                            (brief(name.latest)) " ago"
                        }
                    }
                } }
            }
        }
        @if !activity.losses.is_empty() {
            table {
                caption { "Latest losses" }
                thead { tr {
                    th scope="col" { "Key" } th scope="col" { "Name" } th scope="col" { "Cause" }
                    th scope="col" { "When" } th scope="col" { "Fencing token" }
                } }
                tbody { @for lost in &activity.losses {
                    tr {
                        th scope="row" data-label="Key" { bdi { (visible(lost.key.as_str())) } }
                        td data-label="Name" { @if let Some(name) = &lost.name { bdi { (visible(name.as_str())) } } }
                        td data-label="Cause" { (LockErrorKind::Lost(lost.loss).code()) }
                        td data-label="When" { (brief(lost.ago)) " ago" }
                        td.number data-label="Fencing token" { (lost.fence) }
                    }
                } }
            }
        }
    }
}

fn health_of(health: &Health) -> Markup {
    html! {
        p { "The store is " strong class=(health.verdict()) { (health.verdict()) } "." }
        @for finding in health.findings() {
            div.finding {
                p {
                    strong class=(finding.severity) { (finding.severity) } " "
                    @if let Some(server) = &finding.server { bdi { (visible(server)) } ": " }
                    (visible(&finding.message))
                }
                p { "Remedy: " (visible(&finding.remedy)) }
            }
        }
        table {
            caption { "Servers" }
            thead { tr { th scope="col" { "Server" } th scope="col" { "State" } } }
            tbody { @for server in health.servers() {
                @let report = visible(&server.to_string());
                tr {
                    th scope="row" data-label="Server" { bdi { (visible(&server.name)) } }
                    td data-label="State" { (report.strip_prefix(&format!("{}: ", visible(&server.name))).unwrap_or(&report)) }
                }
            } }
        }
    }
}

fn client(client: &Identity) -> Markup {
    html! { bdi { (visible(&client.to_string())) } }
}

fn reserved(holder: &Holder) -> &'static str {
    match (holder.is_done, holder.is_reservation) {
        (true, _) => " (done, keeps its result)",
        (false, true) => " (released, reserved by min_hold)",
        (false, false) => "",
    }
}

fn mode(mode: Mode) -> String {
    match mode {
        Mode::Permits(permits) => format!("a permit of {permits}"),
        _ => mode.as_str().into(),
    }
}

fn fence(state: &Inspection) -> String {
    state
        .fence
        .map_or_else(|| "unknown".into(), |it| it.to_string())
}

fn left(holder: Option<&Holder>) -> Markup {
    html! {
        @match holder.map(|holder| holder.ttl) {
            Some(Some(left)) => { (brief(left)) }
            Some(None) => { "no expiry" }
            None => {}
        }
    }
}

/// A past time, with the date.
fn since(ago: Option<Duration>) -> Markup {
    let date = ago.and_then(|ago| SystemTime::now().checked_sub(ago));
    let date = date.filter(|date| *date >= SystemTime::UNIX_EPOCH);
    html! {
        @match (ago, date) {
            (Some(ago), Some(date)) => {
                @let date = format_rfc3339_seconds(date).to_string();
                time datetime=(date) title=(date) { (brief(ago)) }
            }
            (Some(ago), None) => { (brief(ago)) }
            (None, _) => { "unknown" }
        }
    }
}
