// The whole of the sites' JavaScript: calendars of date fields, suggestions under text fields, selects that send their form
// when changed. Everything listens on the document, so content that arrives late works too.
const MONTHS = 'January February March April May June July August September October November December'.split(' ');
const iso = (year, month, day) => new Date(Date.UTC(year, month, day)).toISOString().slice(0, 10);

function closeAll() {
  document.querySelectorAll('.calendar, .suggestions').forEach((node) => node.remove());
}

function calendar(field, year, month) { // month may be -1 or 12
  closeAll();
  [year, month] = iso(year, month, 1).split('-').map(Number);
  const box = document.createElement('div');
  box.className = 'calendar';
  const lead = (new Date(Date.UTC(year, month - 1, 1)).getUTCDay() + 6) % 7;
  const count = new Date(Date.UTC(year, month, 0)).getUTCDate();
  let days = ['Mo', 'Tu', 'We', 'Th', 'Fr', 'Sa', 'Su'].map((d) => `<span>${d}</span>`).join('');
  days += '<span></span>'.repeat(lead);
  for (let i = 1; i <= count; i++) {
    const day = iso(year, month - 1, i);
    days += `<button type="button" id="day-${day}" data-day="${day}">${i}</button>`;
  }
  box.innerHTML = `<div class="top"><button type="button" id="cal-prev" data-step="-1">‹</button>
    <b id="cal-title" data-month="${iso(year, month - 1, 1).slice(0, 7)}">${MONTHS[month - 1]} ${year}</b>
    <button type="button" id="cal-next" data-step="1">›</button></div><div class="days">${days}</div>`;
  box.addEventListener('click', (event) => {
    const button = event.target.closest('button');
    if (!button) return;
    event.stopPropagation();
    if (button.dataset.day) {
      field.value = button.dataset.day;
      closeAll();
    } else calendar(field, year, month - 1 + Number(button.dataset.step));
  });
  field.after(box);
}

let asked = 0;
async function suggest(field) {
  const mine = ++asked;
  const answer = await fetch(field.dataset.suggest + '?q=' + encodeURIComponent(field.value));
  const list = await answer.json();
  if (mine !== asked) return;
  closeAll();
  if (!list.length) return;
  const box = document.createElement('div');
  box.className = 'suggestions';
  for (const [id, label] of list) {
    const button = document.createElement('button');
    button.type = 'button';
    button.id = 'suggest-' + id;
    button.textContent = label;
    button.addEventListener('click', () => { field.value = label; closeAll(); });
    box.append(button);
  }
  field.after(box);
}

document.addEventListener('click', (event) => {
  const field = event.target;
  if (field.matches('[data-date]')) {
    const [year, month] = (field.value || field.dataset.date).split('-').map(Number);
    calendar(field, year, month - 1);
  } else if (!field.closest('.calendar, .suggestions')) closeAll();
});
document.addEventListener('input', (event) => {
  if (event.target.matches('[data-suggest]')) suggest(event.target);
});
document.addEventListener('change', (event) => {
  if (event.target.matches('select[data-auto]')) event.target.form.requestSubmit();
});
